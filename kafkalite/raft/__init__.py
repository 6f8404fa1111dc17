"""The metadata log and who may write to it: the ``Quorum`` seam and the node that decides behind it.

``ControllerNode`` needs of consensus only what ``quorum.Quorum`` says: compare-and-append, and committed
entries in order. There are three of it:

- ``SingleQuorum``: one node, its own ``journal``
- ``RaftQuorum``: several voters. ``raft_node`` runs on the Raft loop (``runner``), with ``raft_journal``,
  ``snapshot_store``, ``raft_transport`` and ``raft_messages``; ``voter`` and ``standing`` are its protocol,
  and ``wall`` is the one module that knows the library that elects and replicates
- ``ObserverQuorum``: a node without a vote, which follows
"""
