"""Record batches: bytes to columns and back, compression, and partitioning by key.

Independent of files, sockets, brokers and time. Brokers use ``header``, producers ``builder``, consumers
``batch``.
"""
