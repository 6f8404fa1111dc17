"""Damage at rest: every kind of file of a single node, damaged in every way, after a kill or a stop."""
