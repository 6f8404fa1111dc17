"""A blocking connection to the brokers, for drivers and tasks."""
