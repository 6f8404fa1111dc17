"""The source: plans micro-batches and reads ranges of offsets."""
