"""What every task of the job group shares: wire types, configuration, topology, clients, logs and metrics. No torch."""
