"""Tinker's API on one's own machines: training runs, each a LoRA adapter, on one base model."""
