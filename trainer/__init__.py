"""The trainer, and the Python API: `train_in_process(config)` trains in this process over the same code as a cluster."""

from trainer.in_process import train_in_process

__all__ = ["train_in_process"]
