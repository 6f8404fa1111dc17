"""Pipelines declared in a file: a source, transforms in SQL or Python, and sinks. Spark runs them.

``files`` reads and checks a file without Spark, and ``engine`` runs it. The command is ``kl pipeline``.
"""
