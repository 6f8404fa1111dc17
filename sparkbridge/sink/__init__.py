"""The sink: writes the rows of tasks, commits and aborts batches."""
