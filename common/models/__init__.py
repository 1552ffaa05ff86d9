"""What is known of a model without its weights, and without torch.

- `hub`: whether a model exists, in a directory, in the cache or on the hub.
- `memory`: bytes that training and generation need, from the shape of a model.
- `rotary`: position embeddings that depend on the longest sequence of a batch.
"""
