"""Callbacks that watch a whole run."""
