"""Benchmarks: kafkalite and the bare machine in one run, as ratios."""
