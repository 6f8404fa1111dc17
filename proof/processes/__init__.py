"""Faults on real processes under load."""
