"""A broker's membership in its cluster: controller, registration, peers, Raft connections."""
