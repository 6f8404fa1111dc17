"""Pipelines declared in a file: a source, transforms in SQL or Python, a sink; run by Spark.

``files`` reads and checks a file without Spark, ``engine`` runs it; ``kl pipeline`` is the command.
"""
