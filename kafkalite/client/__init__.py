"""Producer, consumer and admin.

``cluster`` contains the connections, metadata and request retries. ``producer``, ``consumer``, ``group`` and
``admin`` build on it, and ``blocking`` wraps them for programs without asyncio. The modules that decide
(``call_plan``, ``accumulator``, ``assigned_partitions``, ``membership``, ...) are pure; setup.cfg lists them.
"""
