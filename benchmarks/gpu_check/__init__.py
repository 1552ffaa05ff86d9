"""Tests on one GPU what could not be tested without one: `python -m benchmarks.gpu_check`."""
