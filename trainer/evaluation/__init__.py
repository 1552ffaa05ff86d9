"""Evaluation of a model on a data set, for the Python API and the command.

`generators` answer the problems, `evaluator` grades the answers as it does for the training loop,
`results` computes the figures, and `uncertainty` has the statistics behind them.
"""
