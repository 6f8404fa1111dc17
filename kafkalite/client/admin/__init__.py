"""The admin client: topics, configurations, groups, transactions, cluster health."""
