"""The metadata log: the ``Quorum`` interface, its implementations, and the controller that uses it.

``ControllerNode`` uses the interface ``quorum.Quorum``: it appends an entry only if that was decided on the
newest state, and receives committed entries in order. The interface has three implementations:

- ``SingleQuorum``: for one node, without the Raft library.
- ``RaftQuorum``: for several voters. ``node`` runs on the Raft loop (``runner``) and uses ``transport`` and
  ``messages``. ``voter`` and ``eligibility`` are the protocol, and ``adapter`` is the only module that uses
  pysyncobj.
- ``ObserverQuorum``: for a node that is not a voter and only follows the log.

The first two store the same ``metadata_log``: a ``journal``, and a snapshot in a ``snapshot_store``.
"""
