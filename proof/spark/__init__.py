"""Spark queries that are killed at named points, on clusters of real processes."""
