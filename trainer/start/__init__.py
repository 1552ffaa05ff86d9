"""Where a run starts: in a rank of a job group, or in one process.

Torchrun, which `trainer/cli/launch.py` runs, starts the ranks.
"""
