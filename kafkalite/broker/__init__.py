"""One node: the asyncio shell around the pure floors. ``broker.Broker`` puts it together."""
