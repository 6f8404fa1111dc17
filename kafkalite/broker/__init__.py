"""One node: the asyncio shell around the pure packages. ``broker.Broker`` creates and connects its parts."""
