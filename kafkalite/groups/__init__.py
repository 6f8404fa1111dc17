"""Consumer groups: which member owns which partition, and the committed offsets of each group. Pure."""
