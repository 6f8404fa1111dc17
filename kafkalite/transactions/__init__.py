"""Transactions and transaction groups: what their coordinator decides. Pure."""
