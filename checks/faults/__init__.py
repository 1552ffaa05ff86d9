"""One hundred faults that users of RL systems report: is the cause named, how soon, and is anything
falsified or lost? `python -m checks.faults` injects them.
"""
