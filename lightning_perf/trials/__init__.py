"""Trials of changes that may make a training faster: what is tried, in which process, and proof."""
