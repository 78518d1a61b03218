"""The only package that talks to MLflow and to other loggers."""
