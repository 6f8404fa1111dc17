"""Replication between brokers: fetchers, fetch sessions, changes of in-sync sets."""
