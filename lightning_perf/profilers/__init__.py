"""Callbacks that record a window of batches into a file."""
