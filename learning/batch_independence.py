"""Each sequence is computed independently of the others in its batch: LongRoPE gets one set of
factors, and any other dependence on the batch is found.

Transformers chooses the factors of LongRoPE once per pass, by the longest sequence in it. An engine
could not even sample from a policy that chooses them for each sequence: the keys in its cache have
the factors of a shorter sequence. So a run has one set, by the longest sequence that it permits
(docs/adr/0055-a-sequence-is-computed-alone.md).
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.errors import ConfigError
from common.models.rotary import rotations, switch_length

log = logging.getLogger(__name__)
# Tokens of the two made-up sequences.
_SHORT = 12
_LONG = 24
# Mean |Δ log-probability| in nats that rounding explains, in float32 and below: other shapes sum in
# another order.
_ROUNDING = 1e-4
_COARSE_ROUNDING = 0.1
_STANCES: list[AbstractContextManager[None]] = []
_STANCES_LOCK = threading.Lock()
Score = Callable[[Tensor, Tensor | None], Tensor]
"""(tokens [rows, T], their positions [rows, T] or None for 0 to T - 1) -> log-probabilities [rows,
T - 1] after the first."""


def fix_rotary_factors(config: Any, max_tokens: int | None) -> None:
    """Makes LongRoPE use its long factors for every sequence if those of a run may have up to
    `max_tokens` and need them.

    Sequences up to the length at which the factors change need nothing: transformers uses the short
    ones. `config` is the configuration of a transformers model that is not built yet; None for
    `max_tokens` changes nothing.
    """
    text = config.get_text_config()
    switches_at = switch_length(text.to_dict())
    if switches_at is None or max_tokens is None:
        return
    if longest_sequence(text, max_tokens) <= switches_at:
        return
    log.info(
        "sequences may be longer than %d tokens, so all of them get the long factors of LongRoPE",
        switches_at,
    )
    for rotation in rotations(text.rope_parameters):
        for name in ("factor", "mscale"):
            if f"long_{name}" in rotation:
                rotation[f"short_{name}"] = rotation[f"long_{name}"]


def longest_sequence(text: Any, max_tokens: int | None) -> int:
    """Returns the length in tokens of the longest sequence of a run with a model of this text
    configuration.
    """
    positions = getattr(text, "max_position_embeddings", None)
    bounds = [bound for bound in (positions, max_tokens) if bound is not None]
    return min(bounds) if bounds else _LONG


def rounding(low_precision: bool) -> float:
    """Returns the mean |Δ log-probability| in nats that rounding explains."""
    return _COARSE_ROUNDING if low_precision else _ROUNDING


def check_batch_independence(
    model: Any,
    score: Score,
    device: torch.device,
    max_tokens: int | None,
    *,
    low_precision: bool = False,
    modes: Sequence[bool] = (False,),
) -> set[float]:
    """Checks that nothing beside a sequence changes its log-probabilities; returns the rates of
    dropout in these modes.

    `score` is called with a short sequence, and with it and a longer one, which has the last
    positions that the run permits if the model can be told positions. Nothing is dropped, and
    random numbers, buffers and mode of the model stay as they are. A collective if the model is
    sharded.

    Args:
        model: a transformers model.
        score: computes log-probabilities with it.
        device: where the tokens belong.
        max_tokens: the bound on a sequence of the run; None for the model's own.
        low_precision: whether it computes in less than float32.
        modes: the modes to check, training or not.

    Raises ConfigError when a log-probability changes.
    """
    text = model.config.get_text_config()
    vocabulary = model.get_input_embeddings().num_embeddings
    if max_tokens is None:
        max_tokens = switch_length(text.to_dict())
    longest = longest_sequence(text, max_tokens)
    # The longer sequence reaches the last positions that the run permits, where LongRoPE would
    # switch its factors.
    size = max(2, min(_LONG, longest))
    short = min(_SHORT, size)
    # The first tokens differ, because rows that begin with the same prompt would share it. The
    # short sequence is the second: a state, or attention, that does not begin anew would reach it.
    tokens = (torch.arange(2)[:, None] + 7 * torch.arange(size)).to(device) % vocabulary
    positions: Tensor | None = None
    if "position_ids" in inspect.signature(model.get_decoder().forward).parameters:
        positions = torch.arange(size, device=device).repeat(2, 1)
        positions[0] += longest - size
    own_positions = None if positions is None else positions[1:, :short]

    no_dropout = NoDropout()
    with _left_as_it_is(model, device), _eagerly(), no_dropout:
        for training in modes:
            model.train(training)
            alone = score(tokens[1:, :short], own_positions)
            beside = score(tokens, positions)[1:, : short - 1]
            change = _difference(alone, beside)
            if change > rounding(low_precision):
                noise = _difference(alone, score(tokens[1:, :short], own_positions))
                raise _refusal(model, training, change, at_random=noise > rounding(low_precision))
    return no_dropout.rates


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiles nothing inside the block: for its shapes that would take minutes. The stance is one
    of the process, and a trainer and its engine may both be here: the last to leave restores it.
    """
    # Where no layer is compiled, the compiler was not imported, which is large.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _STANCES_LOCK:
        _STANCES.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _STANCES_LOCK:
            _STANCES.pop().__exit__(None, None, None)


@contextmanager
def _left_as_it_is(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores buffers, mode and random numbers after a pass without gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    training = model.training
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=gpus):
            yield
    finally:
        model.train(training)
        for buffer, value in buffers:
            buffer.copy_(value)


def _difference(one: Tensor, other: Tensor) -> float:
    """Returns the mean |Δ log-probability| in nats; 0 for NaNs, which others report."""
    return float((one - other).abs().mean().nan_to_num(nan=0.0))


def _refusal(model: Any, training: bool, change: float, at_random: bool) -> ConfigError:
    mode = " in training mode" if training else ""
    if at_random:
        cause = f"this model draws random numbers{mode}, not only for dropout: "
        when = ""
    else:
        cause = ""
        when = f"{mode} when another one is computed beside it"
    return ConfigError(
        f"{cause}log-probabilities of a sequence change by {change:.2g} nats per token{when}, "
        "so samples and scores would not be those of one policy",
        field="model.name",
        value=model.config.name_or_path,
        remedy="use a model that computes each sequence independently of the others",
    )


def next_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities [rows, T - 1] of `tokens` [rows, T] after the first, of logits
    [rows, T, V].
    """
    logs = logits[:, :-1].float().log_softmax(-1)
    return logs.gather(2, tokens[:, 1:, None])[..., 0]


class NoDropout(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Inside this context nothing is dropped, also in training mode; `rates` are those that would
    have been used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: set[float] = set()

    def __torch_function__(
        self, function: Any, _types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if function is torch.nn.functional.dropout:
            bound = inspect.signature(torch.nn.functional.dropout).bind(*arguments, **options)
            bound.apply_defaults()
            if bound.arguments["training"]:
                self._note(bound.arguments["p"])
            return bound.arguments["input"]
        if options.get("dropout_p"):
            self._note(options["dropout_p"])
            options["dropout_p"] = 0.0
        return function(*arguments, **options)

    def _note(self, rate: float) -> None:
        if rate > 0:
            self.rates.add(rate)
