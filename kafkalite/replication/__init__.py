"""Replicas of one partition: a pure role (``leader``) joined to a log (``partition``). Nothing awaits."""
