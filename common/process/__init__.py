"""What every process needs: its topology, logs, metrics, locks, threads and command line."""
