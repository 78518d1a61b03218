"""The only package that talks to MLflow, other loggers and remote stores."""
