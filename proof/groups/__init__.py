"""The world of one group coordinator, and schedules for the rules of groups."""
