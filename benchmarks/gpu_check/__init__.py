"""Checks on one GPU what needs a GPU to test: `python -m benchmarks.gpu_check`."""
