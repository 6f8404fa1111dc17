"""The metadata log: the ``Quorum`` interface, its implementations, and the controller that uses it.

``ControllerNode`` appends an entry only if it was decided on the newest state, and receives committed
entries in order. ``quorum.Quorum`` is this interface. It has three implementations:

- ``SingleQuorum``: for one node, without the Raft library.
- ``RaftQuorum``: for several voters. ``node`` runs on the Raft loop (``runner``) and uses ``transport`` and
  ``messages``. ``voter`` and ``eligibility`` are the protocol, and ``adapter`` is the only module that uses
  pysyncobj.
- ``ObserverQuorum``: for a node that is not a voter and only follows the log.

The first two store the same ``metadata_log``: a ``journal``, and a snapshot in a ``snapshot_store``.
"""
