"""The producer: batching, sending, acknowledgements, transactions."""
