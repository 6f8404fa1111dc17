"""Raft voters without network, clock or disk: schedules and random runs."""
