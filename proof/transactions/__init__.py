"""Schedules for the rules of transactions."""
