"""Callbacks that record a window of batches into one file."""
