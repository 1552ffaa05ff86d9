"""Faults of the update: numbers that are not finite, policies that run away, memory."""

from typing import Any

import torch

from checks.faults.fault import fault
from checks.faults.lab import Chat, Lab, replaced, texts
from trainer.policy.policy import Policy

_STEPS = 14
_update = Policy.update


def _updates(lab: Lab, before: Any, steps: int = 8, **settings: Any) -> None:
    """Trains with `before(policy)` before each update, once the fault has struck."""

    def update(policy: Policy, batch: Any) -> Any:
        if policy.step >= lab.strike_step:
            lab.strike()
            before(policy)
        return _update(policy, batch)

    with replaced("trainer.policy.policy.Policy.update", update):
        lab.train(lab.settings(trainer__max_steps=steps, **settings))


@fault(
    "a weight of the policy becomes NaN",
    r"not finite|\bnan\b|non-?finite",
    r"weights?|gradients?|update",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/1120",
)
def update_nan_weight(lab: Lab) -> None:
    def damage(policy: Policy) -> None:
        with torch.no_grad():
            next(policy.model.parameters()).view(-1)[: 1 << 14] = float("nan")

    _updates(lab, damage)


@fault(
    "the gradient is not finite, again and again",
    r"not finite|\bnan\b|non-?finite",
    r"gradients?",
    reported="https://github.com/verl-project/verl/issues/747",
)
def update_nan_gradient(lab: Lab) -> None:
    def poison(policy: Policy) -> None:
        parameter = next(policy.model.parameters())
        if not getattr(policy, "poisoned", False):
            parameter.register_hook(lambda gradient: gradient * float("nan"))
            policy.poisoned = True  # type: ignore[attr-defined]

    _updates(lab, poison)


@fault(
    "the learning rate is a hundred times too high",
    r"learning_rate",
    r"too far|moves|diverge|not finite|certain|explod",
    reported="https://github.com/huggingface/trl/issues/2884",
    in_steps=True,
)
def update_learning_rate_high(lab: Lab) -> None:
    lab.strike()
    lab.train(
        lab.settings(
            optimizer__learning_rate=5e-2, trainer__max_steps=_STEPS, algorithm__kl_coef=0.001
        )
    )


@fault(
    "the warm-up is longer than the run, so that hardly anything is learned",
    r"warm-?up",
    r"steps|longer|than",
)
def update_warmup_too_long(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(optimizer__warmup_steps=10_000, trainer__max_steps=_STEPS))


@fault(
    "the reference is another model",
    r"reference",
    r"another|not the model|model\.reference|different|start",
    in_steps=True,
)
def update_wrong_reference(lab: Lab) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = lab.directory / "other"
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    torch.manual_seed(lab.seed + 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(lab.model).save_pretrained(other)
    lab.strike()
    lab.train(
        lab.settings(model__reference=other, algorithm__kl_coef=0.01, trainer__max_steps=_STEPS)
    )


@fault(
    "the model has dropout, which the engine does not have",
    r"dropout",
    r"update|engine|0",
)
def update_dropout(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(lora__rank=4, lora__dropout=0.5, optimizer__learning_rate=5e-3))


@fault(
    "experience is too old for the policy, which has moved",
    r"old",
    r"max_staleness",
    reported="https://github.com/THUDM/slime/issues/195",
    in_steps=True,
)
def update_stale_experience(lab: Lab) -> None:
    lab.strike()
    lab.train(
        lab.settings(
            trainer__max_staleness=6,
            optimizer__learning_rate=1e-2,
            trainer__max_steps=_STEPS,
            algorithm__rollout_correction="none",
        )
    )


@fault(
    "the policy becomes certain before it is right",
    r"entropy",
    r"fell|certain|collapse",
    in_steps=True,
    reported="https://github.com/huggingface/trl/issues/2884",
)
def update_entropy_collapses(lab: Lab) -> None:
    def prefers_ones(completions: list[Chat], **columns: Any) -> list[float]:
        lab.strike()
        return [lab.rng.random() * 0.01 + text.count("1") / 24 for text in texts(completions)]

    lab.script(prefers_ones, max_steps=60, learning_rate=2e-3, per_device_train_batch_size=32)


@fault(
    "the update needs more memory than there is",
    r"out of ?memory|OutOfMemory",
    r"micro_batch_tokens|activation_checkpointing|update|shorter",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/519",
)
def update_out_of_memory(lab: Lab) -> None:
    def fails(policy: Policy) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of "
            "79.11 GiB of which 2.06 GiB is free."
        )

    _updates(lab, fails)
