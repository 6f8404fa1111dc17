"""The sink: writes the rows of tasks, and commits or aborts batches."""
