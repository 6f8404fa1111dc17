"""Quotas of clients and of replication: rates in sampled windows, token buckets, throttle times. Pure."""
