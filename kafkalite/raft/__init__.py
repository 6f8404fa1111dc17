"""The metadata log and who may write to it: the ``Quorum`` seam and the node that decides behind it.

``ControllerNode`` needs of consensus only what ``quorum.Quorum`` says: compare-and-append, and committed
entries in order. ``SingleQuorum`` is that for one node.
"""
