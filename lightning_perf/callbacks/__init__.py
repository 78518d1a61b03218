"""Callbacks that watch a whole run and log metrics."""
