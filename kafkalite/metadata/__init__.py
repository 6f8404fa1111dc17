"""The cluster's state: records, the image they add up to, and the decisions that make new records.

Everything here is pure: a decision takes an image and a command and returns records and a reply
(``controller``); nothing changes until the committed records are replayed on the image (``delta``).
"""
