"""Runs a model on one device: prefills, and decode steps of one token for all running rows.

The state of the rows is on the host. A step uploads it in one copy and waits only for the sampled
tokens. A deterministic decoder works in blocks of one shape (`services.engine.blocks`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage

from common.errors import ConfigError
from learning.batch_independence import check_batch_independence, next_logprobs, rounding
from learning.parking import storages
from learning.routing import Experts, Routers
from services.engine.attention import attending_to, replace_attention
from services.engine.blocks import BlockPasses, attended_columns, compute_experts_in_blocks
from services.engine.cache import SlotCache
from services.engine.failures import SGLANG, described, remedy
from services.engine.graphs import Record, StepGraphs, recorder
from services.engine.llama_on_cpu import LeanDecoder
from services.engine.sampling import Inputs, sample

log = logging.getLogger(__name__)
_KV_SHARE = 0.3
"""Share of a GPU's free memory that the cache may take; a trainer on the same GPU needs the
rest."""
_PROBE = 24
"""Tokens of the made-up sequences of the check at the start."""
_ALIGNED = 64
"""Columns are a multiple of this, because fused kernels copy unaligned masks."""


class UnfitModel(ConfigError):
    """The engine cannot run this kind of model, at any start."""

    code = "unfit_model"


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities, at temperature 1, at the T − 1 tokens of a prompt after the first."""

    logprobs: list[float]
    """[T − 1], of the prompt's own tokens."""
    top: list[list[float]]
    """[T − 1, k], of the likeliest tokens, the likeliest first."""
    top_tokens: list[list[int]]
    """[T − 1, k]"""
    chosen: list[list[float]]
    """[T − 1, n], of the tokens that were asked for."""


class Decoder:
    """A causal language model of transformers with its cache, on the device of its weights.

    On a GPU the cache is allocated once (`reserve`), and decode steps are CUDA graphs.

    If `deterministic`, what it computes and samples after some tokens is a function of the weights,
    these tokens and the row's own inputs alone, to the last bit.
    """

    def __init__(self, module: Any, max_context_tokens: int, deterministic: bool = False) -> None:
        self.module = module
        self.max_context_tokens = max_context_tokens
        self.config = module.config.get_text_config()
        weight = module.get_input_embeddings().weight
        self.device: torch.device = weight.device
        with _refusing(self.config.model_type):
            self.cache = SlotCache(self.config, self.device, weight.dtype)
        self._low_precision = weight.dtype != torch.float32
        self._accepted = signature(module.forward).parameters.keys()
        self.blocks: BlockPasses | None = None
        if deterministic:
            self.blocks = BlockPasses(self.cache, self._forward_block)
            compute_experts_in_blocks(module)
        self.graphs: StepGraphs | None = None
        if self.device.type == "cuda" and not deterministic:
            self.graphs = StepGraphs(self._step, self._recorder(), self.device)
        self._attention = module.config._attn_implementation
        self._attends_to_slots = replace_attention(module, self.config, max_context_tokens)
        self._lean = LeanDecoder.of(module, self.config, max_context_tokens)
        self.routers: Routers | None = None
        self.no_routed_experts = "this model has not been tried"
        """Why it cannot return the experts of tokens; empty if it can."""
        self.prompt_experts: list[Experts] = []
        """[P, layers · top_k] the experts of each prompt of the latest prefill that recorded
        them."""
        self._last: Tensor | None = None
        module.get_output_embeddings().register_forward_pre_hook(self._only_last)

    def _try_routers(self, prompts: Sequence[Sequence[int]]) -> None:
        """Finds the routers of a mixture of experts, if their choices can be recorded."""
        if self.blocks is not None:
            self.no_routed_experts = "a deterministic engine does not record them"
            return
        try:
            self.routers = Routers(self.module)
            self.prefill(prompts, range(len(prompts)), 0, routed=True)
            self.no_routed_experts = ""
        except ConfigError as error:
            self.routers = None
            self.no_routed_experts = error.message

    def _only_last(self, _: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Passes only the last position of each prompt to lm_head (prompts of one batch differ in
        length).
        """
        if self._last is None:
            return None
        hidden, *rest = arguments
        rows = torch.arange(len(hidden), device=self.device)
        return (hidden[rows, self._last][:, None], *rest)

    def reserve(self, rows: int) -> int:
        """Allocates a GPU's cache for up to `rows` rows and returns how many fit; on a CPU the
        cache grows later.

        Raises UnfitModel when the model does not run or does not compute each sequence
        independently, ConfigError when memory is short or not even one row fits.
        """
        with torch.inference_mode():
            self._check_model()
            if self.device.type != "cpu":
                return self._allocate(rows)
            self.cache.release()
            return rows

    def _check_model(self) -> None:
        """Computes made-up sequences, without random numbers or CUDA graphs, and compares the
        results with those of transformers.
        """
        with _refusing(self.config.model_type):
            self._try_routers([[0], [0, 0, 0]])
            try:
                self._check_steps()
            except ConfigError:
                if self._lean is None and self.routers is None:
                    raise
                # The decoder of this package may not be this model's; and where two experts are
                # nearly equal, rounding decides who computes a token.
                self._lean = None
                with self._same_experts():
                    self._check_steps()
            check_batch_independence(
                self.module,
                self._scores,
                self.device,
                max_tokens=self.max_context_tokens,
                low_precision=self._low_precision,
            )
            if self.blocks is not None:
                self.blocks.check(self.module.get_input_embeddings().num_embeddings)

    @contextmanager
    def _same_experts(self) -> Iterator[None]:
        """Inside this context the first experts of every layer compute all tokens."""
        if self.routers is None:
            yield
            return
        first = torch.arange(1, 1 + self.routers.top_k, device=self.device)
        self.routers.given = first.repeat(self.routers.layers)[:, None]
        try:
            yield
        finally:
            self.routers.given = None

    def _check_steps(self) -> None:
        """Checks that prompts of different lengths, and steps after them, compute what transformers
        computes for a whole sequence, without a cache and with its own attention.

        Raises ConfigError where they do not, as when a layer keeps something of its own.
        """
        size = max(2, min(_PROBE, self.max_context_tokens))
        vocabulary = self.module.get_input_embeddings().num_embeddings
        sequences = (7 * np.arange(2 * size) % vocabulary).reshape(2, size)
        rows = np.arange(2)
        lengths = np.array([1, size // 2])
        prompts = [row[:length].tolist() for row, length in zip(sequences, lengths, strict=True)]

        whole = self._whole(torch.from_numpy(sequences).to(self.device))
        logits = self.prefill(prompts, rows.tolist(), 0)
        change = 0.0
        for last in range(size // 2):
            places = lengths - 1 + last
            if last > 0:
                logits = self._next_logits(sequences[rows, places], places)
            difference = logits.log_softmax(-1) - whole[rows, places].log_softmax(-1)
            change = max(change, float(difference.abs().mean().nan_to_num(nan=0.0)))
        if change > rounding(self._low_precision):
            raise ConfigError(
                "it keeps some of what it has read outside of transformers' cache: token by token, "
                f"its log-probabilities differ by {change:.2g} nats",
                remedy=SGLANG,
            )

    def _whole(self, tokens: Tensor) -> Tensor:
        """Returns the logits [B, T, V] of whole sequences [B, T], as transformers computes them."""
        if self._attends_to_slots:
            self.module.set_attn_implementation(self._attention)
        logits: Tensor = self.module(input_ids=tokens, use_cache=False).logits
        replace_attention(self.module, self.config, self.max_context_tokens)
        return logits.float()

    def _next_logits(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the logits [B, V] after `tokens` [B] at `positions` [B] of rows 0..B-1."""
        if self.blocks is not None:
            return self.blocks.next_logits(tokens, positions)
        columns = int(positions.max()) + 1
        on_device = torch.from_numpy(np.stack((tokens, positions))).to(self.device)
        return self._logits_after(on_device[0], on_device[1], columns)

    def _allocate(self, rows: int) -> int:
        columns = -(-self.max_context_tokens // _ALIGNED) * _ALIGNED
        if self.blocks is not None:
            columns = attended_columns(self.max_context_tokens - 1)
        per_row = self.cache.bytes_per_row(columns)
        free, _ = torch.cuda.mem_get_info(self.device)
        fitting = min(rows, int(_KV_SHARE * free) // max(1, per_row))
        size = f"{self.max_context_tokens} tokens at {per_row / 1e6:.1f} MB"
        if not fitting:
            raise ConfigError(
                f"the cache of one completion of {size} does not fit into "
                f"{_KV_SHARE:.0%} of {free / 1e9:.1f} GB free",
                field="--max-context-tokens",
                value=self.max_context_tokens,
                remedy="use a shorter context, a smaller model, or a GPU with more free memory",
            )
        self.cache.allocate(fitting, columns)
        log.info("the cache holds %d completions of %s each, on %s", fitting, size, self.device)
        return fitting

    def storages(self, kind: str) -> list[UntypedStorage]:
        """Returns the storages of the KV cache or of the weights. A growing cache is emptied first,
        and has none.
        """
        if kind == "weights":
            return storages(self.module.state_dict().values(), self.device)
        self.cache.release()
        return storages(self.cache.tensors(), self.device)

    def _recorder(self) -> Record:
        """Returns a recorder that leaves the states alone: it also runs the step that it records,
        and would compute the token twice.
        """
        record = recorder()

        def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            with self.cache.states_unchanged():
                return record(step)

        return recorded

    def forget(self) -> None:
        """Drops recorded steps, which contain addresses, and returns free memory to the device."""
        if self.graphs is not None:
            self.graphs = StepGraphs(self._step, self._recorder(), self.device)
            torch.cuda.empty_cache()

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        owners: Sequence[int],
        first: int,
        *,
        routed: bool = False,
    ) -> Tensor:
        """Computes prompts and stores their keys and values in rows `first` and up. Returns the
        next logits [owners, V].

        `owners` has the prompt of each row: with prompts a and b, the owners 0, 0, 1 put a into two
        rows, for two completions, and b into the third. If `routed`, `prompt_experts` are then
        those of these prompts.
        """
        if self.blocks is not None:
            return self.blocks.prefill(prompts, owners, first)
        parts: list[Tensor] = []
        order: list[int] = []  # of the prompts, as they are computed
        experts: list[Experts] = []
        for together in self._passes(prompts):
            number = {owner: index for index, owner in enumerate(together)}
            rows = [row for row, owner in enumerate(owners, first) if owner in number]
            of_pass = [number[owner] for owner in owners if owner in number]
            chosen = [prompts[index] for index in together]
            lengths = [len(prompt) for prompt in chosen]
            self.cache.begin_prefill(lengths, rows, of_pass)
            self._last = torch.tensor(lengths, device=self.device) - 1
            try:
                with self._recording(routed) as routers:
                    parts.append(self._forward(self._padded(chosen), None, None))
                    if routers is not None:
                        by_token = routers.recorded().T.cpu().numpy().astype(np.int16)
                        padded = by_token.reshape(len(lengths), -1, routers.width)
                        experts += [row[:size] for row, size in zip(padded, lengths, strict=True)]
            finally:
                self._last = None
            order += together

        place = np.argsort(order)
        if routed:
            self.prompt_experts = [experts[index] for index in place]
        return torch.cat(parts)[torch.from_numpy(place[list(owners)]).to(self.device)]

    def _passes(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the prompts, by number, that are computed together.

        Prompts are padded on the right, where causal attention never looks, so that the fastest
        kernel, which takes no mask, can be used. A recurrent state, however, would be that after
        the padding: a model with states computes only prompts of one length together.
        """
        if not self.cache.has_states:
            return [list(range(len(prompts)))]
        by_length: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(index)
        return list(by_length.values())

    @contextmanager
    def _recording(self, routed: bool) -> Iterator[Routers | None]:
        """Records the choices of the routers if `routed`; yields the routers then."""
        if not routed:
            yield None
            return
        assert self.routers is not None, self.no_routed_experts
        with self.routers.recording():
            yield self.routers

    def score(
        self, prompts: Sequence[Sequence[int]], top: int = 0, chosen: Iterable[int] = ()
    ) -> list[PromptScores]:
        """Returns the scores of each prompt, with those of the `top` likeliest tokens and of the
        tokens `chosen`. Running rows stay.
        """
        tokens = self._padded(prompts)
        logs = self._prompt_logits(tokens, None)[:, :-1].float().log_softmax(-1)
        own = logs.gather(2, tokens[:, 1:, None])[..., 0]
        likeliest = logs.topk(top)
        wanted = logs[..., list(chosen)]
        found: list[PromptScores] = []
        for row, prompt in enumerate(prompts):
            numbers = (own, likeliest.values, likeliest.indices, wanted)
            found.append(PromptScores(*(each[row, : len(prompt) - 1].tolist() for each in numbers)))
        return found

    def _scores(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Returns log-probabilities [rows, T - 1] of `tokens` [rows, T] at `positions`."""
        return next_logprobs(self._prompt_logits(tokens, positions), tokens)

    def _prompt_logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Returns the logits [rows, T, V] at `tokens` [rows, T]. The running rows stay as they are,
        and nothing is added to their cache.
        """
        cache = SlotCache(self.config, self.device, self.cache.dtype)
        cache.begin_prefill([tokens.shape[1]], [], [])
        return self._logits(tokens, positions, None, cache=cache)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        padded = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        return torch.from_numpy(padded).to(self.device)

    def decode(self, inputs: Inputs) -> NDArray[np.float64]:
        """Computes and samples one more token of rows 0..B-1; returns what `sample` does.

        If `inputs.routed`, the last layers · top_k rows are the experts that computed the tokens.
        """
        columns = int(inputs.state[1].max()) + 1
        if self.blocks is not None:
            found = self.blocks.decode(inputs)
        elif self.graphs is None:
            state = torch.from_numpy(inputs.state)
            found = self._step(state, columns, inputs.plain, kept=inputs.kept, routed=inputs.routed)
        else:
            found = self.graphs(inputs, columns, (self.cache.rows, self.cache.columns))
        return _read(found)[:, : inputs.state.shape[1]]

    def sample(self, logits: Tensor, inputs: Inputs) -> NDArray[np.float64]:
        """Samples a token for every row of logits [B, V]; see `services.engine.sampling.sample`."""
        if self.blocks is not None:
            return _read(self.blocks.sample(logits, inputs))
        state = torch.from_numpy(inputs.state).to(self.device)
        return _read(sample(logits, state, inputs.plain, kept=inputs.kept))

    def _step(
        self, state: Tensor, columns: int, plain: bool, kept: int = 0, routed: bool = False
    ) -> Tensor:
        """One step without synchronisation: equal shapes run the same operations, so a CUDA graph
        can replay it.
        """
        with self._recording(routed) as routers:
            logits = self._logits_after(state[0].long(), state[1].long(), columns)
            sampled = sample(logits, state, plain, kept=kept)
            if routers is None:
                return sampled
            return torch.cat((sampled, routers.recorded().double()))

    def _logits_after(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Computes `tokens` [B] at `positions` [B] of rows 0..B-1; returns the logits [B, V]."""
        self.cache.begin_tokens(positions, columns)
        return self._forward_block(tokens, positions, needs_logits=True)

    def _forward_block(self, tokens: Tensor, positions: Tensor, needs_logits: bool) -> Tensor:
        """Computes one token for each of `positions` [B]; see `services.engine.blocks.Forward`."""
        mask = None if self._attends_to_slots else self.cache.mask(None)
        arguments = (tokens[:, None], positions[:, None], mask)
        if needs_logits:
            return self._forward(*arguments)
        return self._hidden(*arguments, cache=self.cache)

    def _forward(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        return self._logits(tokens, positions, mask, cache=self.cache)[:, 0].float()

    def _logits(
        self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None, cache: SlotCache
    ) -> Tensor:
        logits: Tensor
        if self._lean is not None:
            logits = self.module.get_output_embeddings()(self._lean(tokens, positions, cache))
        else:
            logits = self._outputs(self.module, tokens, positions, mask, cache=cache).logits
        return logits

    def _hidden(
        self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None, cache: SlotCache
    ) -> Tensor:
        if self._lean is not None:
            return self._lean(tokens, positions, cache)
        decoder = self.module.get_decoder()
        outputs = self._outputs(decoder, tokens, positions, mask, cache=cache)
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def _outputs(
        self,
        module: Any,
        tokens: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        *,
        cache: SlotCache,
    ) -> Any:
        """Returns the outputs of the model or of its decoder, `module`."""
        # A model without attention may have no positions, and another name for its cache.
        options = {
            "position_ids": positions,
            "past_key_values": cache,
            "cache_params": cache,
        }
        accepted = {name: options[name] for name in options.keys() & self._accepted}
        with attending_to(cache):
            outputs = module(input_ids=tokens, attention_mask=mask, use_cache=True, **accepted)
        cache.end()
        return outputs


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Turns any error inside the context into one which says that the engine cannot run a model of
    this kind.
    """
    try:
        yield
    except Exception as error:
        said = error.message if isinstance(error, ConfigError) else described(error)
        advice = error.remedy if isinstance(error, ConfigError) else remedy(error)
        # With more memory the model may run; with another error it never will.
        refusal = ConfigError if isinstance(error, torch.OutOfMemoryError) else UnfitModel
        raise refusal(
            f"the embedded engine cannot run this model: {said}",
            field="--model-path",
            value=kind,
            remedy=advice,
            code=UnfitModel.code,
        ) from error


def _read(found: Tensor) -> NDArray[np.float64]:
    """Returns a result as numpy, once the device has computed it."""
    read: NDArray[np.float64] = found.cpu().numpy()
    return read
