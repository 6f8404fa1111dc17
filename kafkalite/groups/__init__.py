"""Consumer groups: the assignment of partitions to members, and each group's committed offsets. Pure."""
