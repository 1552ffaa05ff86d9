"""Files of weights, for both ends of a transfer: `trainer.weights` publishes them,
`services.rollout.weights` fetches them.

- `checksums`: whether a file is whole.
- `deltas`: a file as its difference from the previous version.
- `recycled_files`: files of an old version that are written again.
"""
