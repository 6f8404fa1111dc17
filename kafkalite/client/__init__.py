"""Producer, consumer and admin: what people hold in their hands.

These decide and touch nothing outside: ``routing``, ``accumulator`` with ``partition_queue``, ``fetch_state``
with ``progress``, ``membership``, ``retry``.
``connection`` and ``cluster`` are the rim to the network, ``producer``, ``consumer`` and ``admin`` the three
faces, ``sync`` their blocking twins. Nothing is imported here, so that using one costs one.
"""
