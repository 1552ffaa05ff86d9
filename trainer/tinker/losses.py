"""Tinker's losses, per token, as its documentation defines them
(tinker-docs.thinkingmachines.ai/tinker/losses). A loss is the sum over all tokens of a request.

In the equations p is the model that is trained, q the one that sampled, ρ = p / q, A the advantage,
w the weight (1 unless it is given) and sg stops the gradient. C is the number of targets.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidInput, did_you_mean
from learning.layout import moved
from trainer.tinker.interface import WITHOUT_STABLE_REINFORCE, Datum

TARGETS = "target_tokens"
_LOW = "clip_low_threshold"
_HIGH = "clip_high_threshold"
_RATIO_MASK = "sequence_ratio_mask"
_INPUTS = "loss_fn_inputs."


DATUM = "datum"
Terms = Mapping[str, Tensor]
"""[C] each: the inputs of the data and the settings of the loss by name, and as `DATUM` the index
of the datum that each target belongs to."""


@dataclass(frozen=True)
class Loss:
    """A loss, what it needs, and its settings with their defaults."""

    per_target: Callable[[Tensor, Terms], Tensor]
    """(log p [C], terms) -> the loss [C] before weights."""
    needs: Sequence[str] = ()
    """Inputs that every datum must have, besides the targets."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """A datum may have a setting too, for each token."""

    def __call__(self, logprobs: Tensor, terms: Terms) -> Tensor:
        return self.per_target(logprobs, terms) * terms["weights"]

    @property
    def optional(self) -> dict[str, float]:
        """Inputs that a datum may have, with what is used for one that has none."""
        return {"weights": 1.0, **self.settings}


def cross_entropy(logprobs: Tensor, _terms: Terms) -> Tensor:
    """−log p. With w = −dL/d log p it has the gradient of any loss L of the log-probabilities,
    which is how a client computes its own (`forward_backward_custom`).
    """
    return -logprobs


def importance_sampling(logprobs: Tensor, terms: Terms) -> Tensor:
    """−ρ · A."""
    return -_ratio(logprobs, terms) * terms["advantages"]


def ppo(logprobs: Tensor, terms: Terms) -> Tensor:
    """−min(ρ · A, clip(ρ, low, high) · A)."""
    return _clipped(_ratio(logprobs, terms), terms)


def gspo(logprobs: Tensor, terms: Terms) -> Tensor:
    """The loss of `ppo` with s instead of ρ: exp of the mean of log ρ over the tokens of the datum
    that `sequence_ratio_mask` marks. Its gradient flows through the token's own log-probability.
    """
    own = logprobs.detach()
    marked = (terms[_RATIO_MASK] != 0).float()
    datum = terms[DATUM]
    zeros = own.new_zeros(len(own))  # at least one for each datum
    sums = zeros.index_add(0, datum, (own - terms["logprobs"]) * marked)
    counts = zeros.index_add(0, datum, marked)
    mean = (sums / counts)[datum]
    return _clipped(torch.exp(mean + logprobs - own), terms)


def cispo(logprobs: Tensor, terms: Terms) -> Tensor:
    """−sg(clip(ρ, low, high)) · log p · A."""
    weight = _clip(_ratio(logprobs.detach(), terms), terms)
    return -weight * logprobs * terms["advantages"]


def dro(logprobs: Tensor, terms: Terms) -> Tensor:
    """Direct reward optimisation: −(log p · A − β/2 · (log ρ)²)."""
    penalty = terms["beta"] / 2 * (logprobs - terms["logprobs"]) ** 2
    return penalty - logprobs * terms["advantages"]


def _ratio(logprobs: Tensor, terms: Terms) -> Tensor:
    return torch.exp(logprobs - terms["logprobs"])


def _clip(ratio: Tensor, terms: Terms) -> Tensor:
    return ratio.clamp(min=terms[_LOW], max=terms[_HIGH])


def _clipped(ratio: Tensor, terms: Terms) -> Tensor:
    advantages = terms["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, terms) * advantages)


_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy),
    "importance_sampling": Loss(importance_sampling, _SAMPLED),
    "ppo": Loss(ppo, _SAMPLED, {_LOW: 0.8, _HIGH: 1.2}),
    "cispo": Loss(cispo, _SAMPLED, {_LOW: 0.0, _HIGH: 4.0}),
    "dro": Loss(dro, _SAMPLED, {"beta": 0.05}),
    "gspo": Loss(gspo, (*_SAMPLED, _RATIO_MASK), {_LOW: 1 - 3e-4, _HIGH: 1 + 4e-4}),
}
"""The losses by Tinker's names. The bounds of `gspo` are those of its paper."""


def checked_loss(
    name: str, config: Mapping[str, float | str], stable_reinforce: str = ""
) -> tuple[Loss, dict[str, float]]:
    """Returns a loss and its settings. Raises InvalidInput for a name or a setting that it does not
    know. `stable_reinforce` names the loss in its place.
    """
    if name == "stable_reinforce" and stable_reinforce:
        name = stable_reinforce
    loss = LOSSES.get(name)
    if loss is None:
        remedy = did_you_mean(name, LOSSES)
        if name == "stable_reinforce":
            remedy = WITHOUT_STABLE_REINFORCE
        elif name == "custom":
            remedy = "pass a function to forward_backward_custom, which computes it in the client"
        raise InvalidInput("this loss is not served", field="loss_fn", value=name, remedy=remedy)
    settings = dict(loss.settings)
    for key, value in config.items():
        if key not in settings:
            raise InvalidInput(
                f"the loss {name} has no such setting",
                field=f"loss_fn_config.{key}",
                value=value,
                remedy=did_you_mean(key, settings) if settings else "leave it out",
            )
        if isinstance(value, str) or not np.isfinite(value):
            raise InvalidInput(
                "it must be a finite number",
                field=f"loss_fn_config.{key}",
                value=value,
                remedy=f"the default is {settings[key]}",
            )
        settings[key] = float(value)
    if settings.get(_LOW, 0.0) > settings.get(_HIGH, 0.0):
        raise InvalidInput(
            f"it is above {_HIGH}",
            field=f"loss_fn_config.{_LOW}",
            value=settings[_LOW],
            remedy="give bounds of the ratio, such as 0.8 and 1.2",
        )
    return loss, settings


def check_data(data: Sequence[Datum], loss: Loss, *, vocabulary: int, longest: int | None) -> None:
    """Raises InvalidInput for the first datum that the loss cannot be computed of.

    Args:
        data: of one request.
        loss: the loss.
        vocabulary: number of tokens of the model.
        longest: number of tokens that the model can read; None for any.
    """
    if not data:
        raise InvalidInput(
            "the request has no data", field="data", value=[], remedy="send at least one"
        )
    for number, datum in enumerate(data):
        problems = chain(
            _sequence_problems(datum, loss, vocabulary, longest or sys.maxsize),
            _input_problems(datum, loss),
        )
        for name, value, problem, remedy in problems:
            raise InvalidInput(problem, field=f"data[{number}].{name}", value=value, remedy=remedy)


_Problems = Iterator[tuple[str, Any, str, str]]
"""What is wrong with a datum: field, value, problem and remedy."""


def _sequence_problems(datum: Datum, loss: Loss, vocabulary: int, longest: int) -> _Problems:
    tokens = np.asarray(datum.tokens)
    if not 0 < len(tokens) <= longest:
        problem = f"a sequence has 1 to {longest} tokens"
        yield "model_input", len(tokens), problem, "cut it, or leave it out"
    for name in (TARGETS, *loss.needs):
        if name not in datum.inputs:
            yield _INPUTS + name, sorted(datum.inputs), "it is missing", "add it"

    targets = datum.inputs[TARGETS]
    for where, ids in (("model_input", tokens), (_INPUTS + TARGETS, targets)):
        outside = ids[(ids < 0) | (ids >= vocabulary) | (ids % 1 != 0)]
        if outside.size:
            problem = f"tokens of the base model are 0 to {vocabulary - 1}"
            yield where, outside[0].item(), problem, "use the tokenizer of the base model"
    # Losses with advantages are of one target.
    dimensions = (1,) if loss.needs else (1, 2)
    if len(targets) != len(tokens) or targets.ndim not in dimensions or not targets.size:
        problem = f"there must be one target, or K, for each of the {len(tokens)} tokens"
        yield _INPUTS + TARGETS, list(targets.shape), problem, "give the token after each token"


def _input_problems(datum: Datum, loss: Loss) -> _Problems:
    known = [TARGETS, *loss.needs, *loss.optional]
    shape = datum.inputs[TARGETS].shape
    for name, values in datum.inputs.items():
        where = _INPUTS + name
        if name not in known:
            yield where, name, "the loss does not read it", did_you_mean(name, known)
        if values.shape != shape:
            problem = f"its shape must be {list(shape)}, as that of {TARGETS}"
            yield where, list(values.shape), problem, "give one number for each target"
        bad = values[~np.isfinite(values)]
        if bad.size:
            yield where, bad[0].item(), "it must be finite", "look for the step that computed it"
        if name == _RATIO_MASK and not values.any():
            yield where, 0, "it marks no token", "set it to 1 for the sampled tokens"


def terms_of(
    data: Sequence[Datum], loss: Loss, settings: Mapping[str, float], device: torch.device
) -> Terms:
    """Returns what the loss reads of these data, which are checked, on `device`."""
    counts = [datum.inputs[TARGETS].size for datum in data]
    owners = torch.from_numpy(np.repeat(np.arange(len(data)), counts))
    given = {DATUM: moved(owners, device)}
    for name, default in {**dict.fromkeys(loss.needs, 0.0), **loss.optional, **settings}.items():
        columns = [
            np.asarray(datum.inputs[name], np.float32).reshape(-1)
            if name in datum.inputs
            else np.full(datum.inputs[TARGETS].size, default, np.float32)
            for datum in data
        ]
        given[name] = moved(torch.from_numpy(np.concatenate(columns)), device)
    return given
