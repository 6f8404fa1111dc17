"""Record batches: bytes to columns and back, compression, and partitioning by key.

Independent of files, sockets, brokers and time. ``header`` is for brokers, ``builder`` for producers,
``batch`` for consumers.
"""
