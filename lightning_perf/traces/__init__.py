"""The trace writer: name, compress, place, upload and prune files. Reading traces. No torch."""
