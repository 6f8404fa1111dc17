"""The sink: writers of tasks, commit and abort of batches."""
