"""Checks beyond the tests: a GPU (`rlhf gpu-check`), what a run says to a fault (`checks.faults`),
and what a command says to a mistake (`checks.mistakes`).
"""
