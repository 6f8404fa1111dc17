"""A consumer's membership in a group: heartbeats, assignment, commits."""
