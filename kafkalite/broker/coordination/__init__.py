"""Coordinators of consumer groups and transactions, and the transactions' markers."""
