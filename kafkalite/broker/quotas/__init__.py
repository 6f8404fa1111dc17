"""Quotas of clients: rates in sampled windows, token buckets, and the throttle times that follow. Pure."""
