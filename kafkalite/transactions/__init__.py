"""Transactions and transaction groups: the decisions of their coordinator. Pure."""
