"""Coordinators of consumer groups and transactions, and the sending and writing of transaction markers."""
