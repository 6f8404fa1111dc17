"""Decisions of the coordinator of transactions and transaction groups. Pure."""
