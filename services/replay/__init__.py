"""The replay-buffer: a durable queue of fresh groups, and prioritised reuse of consumed ones.

- `app`: its HTTP API; `worker` runs the buffer in one thread.
- `buffer`: what it does, without HTTP. `sampling` chooses the groups for reuse.
- `store` changes what is stored, above `reading` (queries) and `database` (the SQLite file).
"""
