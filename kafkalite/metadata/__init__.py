"""The cluster's state: records, the image built from them, and the decisions that create new records.

Everything here is pure: a decision takes an image and a command and returns records and a reply
(``controller``); nothing changes until the committed records are replayed on the image (``delta``).
"""
