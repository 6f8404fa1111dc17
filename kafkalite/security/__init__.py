"""Authentication and authorisation, without I/O.

``acls`` decides who may do what, and ``required`` names the permissions that each request needs. ``sasl`` has
the logins of a connection, with the mechanisms in ``scram``, ``plain`` and ``oauth``. ``principal_mapping``
derives a principal from a certificate.
"""
