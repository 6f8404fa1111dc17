"""The protocol as data (``schema``), and the checks of ``kl conformance``: of a server (``suite``), and of a
client (``client_checks``)."""
