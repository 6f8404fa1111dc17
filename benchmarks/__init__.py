"""Benchmarks: the machine's bare yardsticks and kafkalite, in one run, as ratios."""
