"""How often Python looks for garbage in cycles."""

import gc

OF_SERVICE = 100_000
OF_TRAINER = 10_000
"""A tensor in a cycle keeps its GPU memory until the next collection."""


def collect_less_often(after: int) -> None:
    """Keeps libraries, models and all else that exists now out of garbage collections, and starts a
    collection only after `after` new objects; Python's default is 700.

    Requests in progress hold hundreds of objects each. Scans of these and of the modules, none of
    them garbage, took a third of a server's processor time (`python -m benchmarks.agents calls`),
    and a twelfth of the time in which a trainer collects answers (`python -m
    benchmarks.collector`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(after)
