"""The source: planning of micro-batches, reading of offset ranges."""
