"""Consumer groups: who owns which partition, and how far each group has read. Pure."""
