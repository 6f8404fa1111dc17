"""Spark queries killed at named points, clusters of real processes."""
