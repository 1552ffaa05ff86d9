"""The schedule of the learning rate."""

import torch
from transformers import get_scheduler

from common.settings.sections import OptimizerSection


def learning_rate(step: int, total_steps: int | None, settings: OptimizerSection) -> float:
    """Returns the learning rate after `step` steps, by the schedule of transformers.

    The first of W warm-up steps has 1/W of the rate; in transformers it has 0, which wastes its
    batch.
    """
    warmup = settings.warmup_steps
    schedule = settings.lr_schedule
    arguments = settings.lr_schedule_args
    if schedule == "constant" or (total_steps is None and schedule != "inverse_sqrt"):
        return settings.learning_rate * min(1.0, (step + 1) / max(1, warmup))

    # The schedule is a function of the step; the optimiser only tells it the highest rate.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
    scheduler = get_scheduler(
        schedule,
        optimizer,
        num_warmup_steps=warmup,
        # One of the two decides the end of the stable phase.
        num_training_steps=None if "num_stable_steps" in arguments else total_steps,
        scheduler_specific_kwargs=arguments,
    )
    (factor,) = scheduler.lr_lambdas
    return settings.learning_rate * float(factor(step + 1 if step < warmup else step))
