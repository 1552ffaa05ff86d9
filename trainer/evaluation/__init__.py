"""Evaluation of a model on a data set, for the Python API and the command.

`generators` answer the problems, `trainer.rollouts.evaluation` grades the answers as it does for
the training loop, `results` counts them, and `statistics` has the mathematics.
"""
