"""The metadata log: the ``Quorum`` interface, its implementations, and the controller that uses it.

``ControllerNode`` uses the log through the interface ``quorum.Quorum``. An entry takes effect only if it was
decided on the newest state, and every node applies the committed entries in the same order. The interface has
three implementations:

- ``SingleQuorum``: for one node, without the Raft library.
- ``RaftQuorum``: for several voters. ``node`` runs on the Raft loop (``runner``) and uses ``transport`` and
  ``messages``. ``adapter`` is the only module that uses the Raft library, pysyncobj. ``voter``,
  ``eligibility`` and ``restart`` add the parts of the protocol that the library lacks.
- ``ObserverQuorum``: for a node that is not a voter and only follows the log.

The first two store the log in the same files (``metadata_log``): a ``journal``, and a snapshot
(``snapshot_store``).
"""
