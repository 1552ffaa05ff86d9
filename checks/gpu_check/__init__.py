"""Checks on one GPU what needs a GPU to test: `rlhf gpu-check`."""
