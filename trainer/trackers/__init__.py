"""Experiment trackers (docs/how-to/metrics.md): each gets the content of `metrics.jsonl` in a
thread with a bounded queue.
"""
