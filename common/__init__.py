"""Code that all tasks of the job group share: wire types, configuration, topology, clients, logs
and metrics. No torch.
"""

VERSION = "0.1.0"
"""Version of the system; the same as in `pyproject.toml`."""
