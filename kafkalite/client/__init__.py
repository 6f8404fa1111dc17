"""Producer, consumer and admin: what people hold in their hands.

Four modules decide and touch nothing outside: ``routing``, ``accumulator``, ``fetch_state``, ``retry``.
``connection`` and ``cluster`` are the rim to the network, ``producer``, ``consumer`` and ``admin`` the three
faces, ``sync`` their blocking twins. Nothing is imported here, so that using one costs one.
"""
