"""Benchmarks: what the system does, measured."""
