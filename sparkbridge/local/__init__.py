"""Spark on one machine: sessions, quick starts, warm-up."""
