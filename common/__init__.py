"""What every task of the job group shares: wire types, configuration, topology, clients, logs and metrics. No torch."""

VERSION = "0.1.0"
"""Of the system, as in `pyproject.toml`."""
