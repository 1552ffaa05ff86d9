"""Experiment trackers (docs/how-to/trackers.md): what goes to `metrics.jsonl` goes to them too.

Each has a process of its own, fed by a thread from a bounded queue: neither a slow nor a broken tracker touches a step.
Nothing is imported here, so that those processes stay small.
"""
