"""The server of a broker: connections, dispatch of requests, responses."""
