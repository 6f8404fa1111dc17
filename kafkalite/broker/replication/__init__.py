"""Replication between brokers: fetchers, fetch sessions, and changes of in-sync sets."""
