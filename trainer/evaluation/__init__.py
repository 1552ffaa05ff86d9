"""Evaluation of a model on a data set, for the Python API and the command.

`generators` answer the problems, `evaluator` grades them as it does for
the training loop, `results` counts them, and `uncertainty` has the mathematics.
"""
