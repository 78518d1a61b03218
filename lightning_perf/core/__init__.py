"""Values and arithmetic: time, progress, windows, throughput. Standard library and numpy only."""
