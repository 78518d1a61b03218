"""The only rooms that talk to MLflow and to other loggers."""
