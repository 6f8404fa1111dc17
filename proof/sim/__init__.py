"""Whole clusters in virtual time, from seeds."""
