"""Sizes that bound the work of the reward-server."""

MAX_BATCH_ITEMS = 4096
"""Answers of one request."""
BATCHES_QUEUED = 4
"""Requests of that size that may wait for one function."""
FUNCTION_BATCH = 64
"""Completions of one call of a function; larger batches are spread over the workers."""
