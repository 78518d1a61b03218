"""Worker threads, files that appear whole, and bounded waits: no torch, no Lightning."""
