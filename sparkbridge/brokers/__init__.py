"""Blocking connections to the brokers, for drivers and tasks."""
