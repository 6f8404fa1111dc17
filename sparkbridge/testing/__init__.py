"""Programs that show what the bridge promises: queries killed at named points, clusters of real processes.

For this project's own tests and ``make spark-faults``. They use ``kafkalite.testing``; the bridge does not.
"""
