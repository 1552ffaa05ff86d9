"""Benchmarks, and the check of a GPU (`rlhf-gpu-check`)."""
