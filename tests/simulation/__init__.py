"""The flow of data under deterministic simulation: the real services and the real collector, on a
simulated clock, network and disk.
"""
