"""Experiment trackers (docs/how-to/trackers.md): each gets what goes to `metrics.jsonl`, in a thread with a bounded queue."""
