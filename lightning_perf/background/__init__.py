"""Worker thread, atomic files and bounded waits. No torch, no Lightning."""
