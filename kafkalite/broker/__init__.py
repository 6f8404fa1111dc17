"""One node: sockets, tasks and disk jobs around the pure packages.

``Broker`` creates and connects its parts.
"""
