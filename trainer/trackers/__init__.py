"""Experiment trackers (docs/trackers.md): they get what goes to `metrics.jsonl`, each in a thread with a bounded queue."""
