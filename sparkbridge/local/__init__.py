"""Creates Spark sessions, and makes them start faster on one machine."""
