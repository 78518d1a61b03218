"""Values and arithmetic: time, progress, batches, throughput. Standard library and numpy only."""
