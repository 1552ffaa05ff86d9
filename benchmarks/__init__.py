"""Benchmarks, and the GPU check (`rlhf gpu-check`)."""
