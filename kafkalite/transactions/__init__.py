"""The transaction coordinator's decisions about transactions and transaction groups. Pure."""
