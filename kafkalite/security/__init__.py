"""Authentication and authorisation: pure state machines and decisions, below every protocol.

``acls`` decides who may do what, ``scram`` proves who a client is, and ``required`` names the permission that
each request needs. ``principal_mapping`` derives a principal from a certificate.
"""
