"""The consumer: fetching, positions, isolation, deduplication."""
