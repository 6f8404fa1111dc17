"""The proof of kafkalite: simulated worlds, directed schedules, mutants, process faults. Not in the wheel."""
