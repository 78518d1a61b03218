"""Worker threads, atomic files and bounded waits: no torch, no Lightning."""
