"""The flow of data under deterministic simulation: the real services and the real collector, on a
simulated clock and network. A process that crashes leaves its files as they are.
"""
