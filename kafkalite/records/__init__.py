"""Record batches: bytes to columns and back, compression, and which partition a key belongs to.

Knows nothing of files, sockets, brokers or time. ``header`` is what brokers need, ``builder`` what
producers need, ``batch`` what consumers need.
"""
