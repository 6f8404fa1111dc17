"""Replicas of one partition: ``partition`` joins a role (``leader``, ``follower``) to a log. All code here is
synchronous."""
