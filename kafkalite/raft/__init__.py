"""The metadata log and the nodes that may write to it: the ``Quorum`` seam, and the controller behind it.

``ControllerNode`` needs only compare-and-append and committed entries in order. ``quorum.Quorum`` is
that interface; it has three implementations:

- ``SingleQuorum``: one node, without the Raft library
- ``RaftQuorum``: several voters. ``node`` runs on the Raft loop (``runner``), with ``transport`` and
  ``messages``; ``voter`` and ``eligibility`` are the protocol, and ``adapter`` is the one module that
  knows pysyncobj
- ``ObserverQuorum``: a node that is no voter, which follows

The first two keep the same ``metadata_log``: a ``journal`` and the snapshot in a ``snapshot_store``.
"""
