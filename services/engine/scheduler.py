"""Decides what runs when: admission, decoding, pauses and new weights. Single-threaded; `engine`
gives it a thread.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import Counter
from torch import UntypedStorage

from common import Json
from common.errors import ServiceError
from services.engine.adapters import AdapterRegistry, BadAdapter
from services.engine.decoder import PromptScores
from services.engine.jobs import ABORTED, ABORTED_WAITING, GenerationJob, Sequence
from services.engine.model import Model
from services.engine.rows import Rows
from services.engine.weights import copy_tensors, load_into

MemoryKind = Literal["kv_cache", "weights"]
PREFILL_TOKENS = 16_384
"""Maximum padded tokens of one prefill: bounds its memory and how long running rows wait for it."""


class LogitsNotFinite(ServiceError):
    """The model's logits are not finite, so nothing was sampled (500)."""

    code = "not_finite"


class RequestRefused(ServiceError):
    """The call does not fit the state of the engine (400)."""

    status = 400
    code = "refused"


class Scheduler:
    """The queue, the running rows (at most `max_running`) and the model."""

    def __init__(
        self,
        model: Model,
        max_running: int,
        weight_version: str,
        *,
        generated: Counter,
        prefilled: Counter,
    ) -> None:
        self.model = model
        self.max_running = model.reserve(max_running)
        self.weight_version = weight_version
        self.generated = generated
        self.prefilled = prefilled
        self.paused = False
        self.released: dict[str, list[tuple[UntypedStorage, int]]] = {}
        """Storages and sizes of released memory, by kind."""
        self._no_weights = False
        self.waiting = 0
        self.rows = Rows(self.max_running)
        self.adapters = AdapterRegistry(model.module)
        self._queue: deque[list[Sequence]] = deque()
        """Sequences that wait for one prefill of the same tokens."""

    @property
    def can_step(self) -> bool:
        return not self.paused and bool(self.rows.sequences or self._queue)

    def enqueue(self, jobs: list[GenerationJob]) -> None:
        """Appends jobs to the queue; a job whose adapter is not loaded fails."""
        for job in jobs:
            try:
                self._refuse_unknown(job.adapter)
            except BadAdapter as error:
                job.done.set_exception(error)
                continue
            self.waiting += job.n
            for start in range(0, job.n, self.max_running):
                self._queue.append(job.sequences[start : start + self.max_running])

    def _refuse_unknown(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self.adapters.paths():
            raise BadAdapter(
                "Got LoRA adapter that is not loaded",
                field="lora_path",
                value=adapter,
                remedy="POST /load_lora_adapter first",
            )

    def step(self, admit: bool) -> None:
        """Prefills what fits (if `admit`), then decodes one token for every running row."""
        if admit:
            self._admit()
        if self.rows.sequences:
            inputs = self.rows.inputs(0)
            sampled = self.model.decode(inputs)
            if inputs.routed:
                assert self.model.routers is not None
                self.rows.append_experts(sampled[-self.model.routers.width :])
            self._advance(0, sampled)

    def _admit(self) -> None:
        """Prefills waiting groups in order, as many as fit, and samples their first tokens."""
        while self._queue:
            batch = self._next_batch()
            if not batch:
                return
            sequences: list[Sequence] = []
            owners: list[int] = []  # the prompt of each sequence
            places: dict[tuple[int, ...], int] = {}  # of prompts: equal ones are computed once
            for group in batch:
                place = places.setdefault(tuple(group[0].so_far), len(places))
                sequences += group
                owners += [place] * len(group)
            prompts = list(places)

            first = len(self.rows)
            routed = any(sequence.job.returns_experts for sequence in sequences)
            logits = self.model.prefill(prompts, owners, first, routed=routed)
            if routed:
                for sequence, owner in zip(sequences, owners, strict=True):
                    sequence.experts = [self.model.prompt_experts[owner]]
            self.prefilled.inc(sum(map(len, prompts)))
            self.rows.add(sequences, [len(prompts[owner]) for owner in owners])
            # Until now they waited: an engine that computes a long prompt is not idle.
            self.waiting -= len(sequences)
            computed: set[int] = set()
            for sequence, owner in zip(sequences, owners, strict=True):
                sequence.note_version(self.weight_version, len(sequence.tokens))
                sequence.cached_tokens = len(sequence.job.prompt) if owner in computed else 0
                computed.add(owner)
            self._advance(first, self.model.sample(logits, self.rows.inputs(first)))

    def _next_batch(self) -> list[list[Sequence]]:
        """Takes the groups that the next prefill computes from the queue. When no row runs, it
        first merges the adapter of the oldest group.
        """
        batch: list[list[Sequence]] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        free = self.max_running - len(self.rows)
        if not self.rows.sequences:  # nothing that runs depends on what is merged now
            self.adapters.merge(self._queue[0][0].job.adapter)
        while self._queue and len(self._queue[0]) <= free:
            group = self._queue[0]
            prompt = tuple(group[0].so_far)
            longest = max(longest, len(prompt))
            if batch and len({*prompts, prompt}) * longest > PREFILL_TOKENS:
                break  # prompts are padded to the longest; a single one may exceed the limit
            if group[0].job.adapter != self.adapters.active:
                break  # all rows share the weights: wait until they are done
            batch.append(self._queue.popleft())
            prompts.add(prompt)
            free -= len(group)
        return batch

    def _advance(self, first: int, sampled: NDArray[np.float64]) -> None:
        """Appends sampled tokens to rows `first` and up, and removes the rows that finish.

        Logits that are not finite fail the whole job: its other completions have the same fault.
        """
        rows = self.rows
        is_stop, is_full, is_finite = rows.append(first, sampled)
        self.generated.inc(len(rows) - first)
        # Few rows end in a step, and only these cost anything.
        may_end = is_stop | is_full | ~is_finite | rows.state["has_stops"][first : len(rows)]
        reasons: dict[int, Json] = {}
        broken: set[GenerationJob] = set()
        for index in np.flatnonzero(may_end).tolist():
            row = first + index
            reason = self._reason(row, is_stop=is_stop[index], is_full=is_full[index])
            if not is_finite[index]:
                broken.add(rows.sequences[row].job)
            elif reason is not None:
                reasons[row] = reason
        if not reasons and not broken:
            return

        ending = [
            row
            for row, sequence in enumerate(rows.sequences)
            if row in reasons or sequence.job in broken
        ]
        finished = {rows.sequences[row]: reason for row, reason in reasons.items()}
        if broken:
            # Even a masked NaN spreads (0 · NaN = NaN), to whoever gets the row next.
            self.model.cache.zero(ending)
        self._take_out(ending)
        for sequence, reason in finished.items():
            if sequence.job not in broken:
                self._finish(sequence, reason)
        if broken:
            self._filter_queue(lambda sequence: sequence.job in broken)
        for job in broken:
            job.done.set_exception(_not_finite(self.weight_version))

    def _reason(self, row: int, *, is_stop: bool, is_full: bool) -> Json | None:
        """Returns why a row ends, as SGLang says it; None while it goes on."""
        sampling = self.rows.sequences[row].job.sampling
        if is_stop:
            return {"type": "stop", "matched": self.rows.tail(row, 1)[0]}
        stop_text = sampling.stop_in(
            lambda count: str(self.model.tokenizer.decode(self.rows.tail(row, count)))
        )
        if stop_text:
            return {"type": "stop", "matched": stop_text}
        return {"type": "length", "length": sampling.max_new_tokens} if is_full else None

    def _finish(self, sequence: Sequence, reason: Json) -> None:
        sequence.finish = reason
        sequence.version = self.weight_version
        job = sequence.job
        if all(each.finish is not None for each in job.sequences):
            job.done.set_result(job.sequences)

    def _take_out(self, removed: list[int]) -> None:
        """Removes rows, whose sequences keep what was generated."""
        self.rows.collect(removed)
        to, origin = self.rows.remove(removed)
        if to:
            self.model.cache.move(to, origin)

    def abort(self, matches: Callable[[Sequence], bool] = lambda _: True) -> None:
        """Finishes the matching sequences with the tokens they have."""
        rows = [row for row, sequence in enumerate(self.rows.sequences) if matches(sequence)]
        stopped = [self.rows.sequences[row] for row in rows]
        self._take_out(rows)
        for sequence in stopped:
            self._finish(sequence, {"type": "abort", "message": ABORTED})
        for sequence in self._filter_queue(matches):
            message = ABORTED if sequence.tokens else ABORTED_WAITING
            self._finish(sequence, {"type": "abort", "message": message})

    def _filter_queue(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Removes the matching sequences from the queue and returns them."""
        removed: list[Sequence] = []
        left = [[sequence for sequence in group if not matches(sequence)] for group in self._queue]
        for group in self._queue:
            removed += [sequence for sequence in group if matches(sequence)]
        self._queue = deque(group for group in left if group)
        self.waiting -= len(removed)
        return removed

    def score(
        self,
        prompts: list[list[int]],
        adapter: str | None = None,
        *,
        top: int = 0,
        chosen: Iterable[int] = (),
    ) -> tuple[list[PromptScores], str]:
        """Returns the scores of the prompts (`Decoder.score`) under the weights with this adapter,
        and their version.

        Raises RequestRefused while memory is released, BadAdapter for an adapter that is not
        loaded, LogitsNotFinite for a broken model.
        """
        self._refuse_without_memory()
        self._refuse_unknown(adapter)
        with self.adapters.only(adapter):
            found = self.model.score(prompts, top, chosen)
        if not all(math.isfinite(logprob) for scores in found for logprob in scores.logprobs):
            raise _not_finite(self.weight_version)
        return found, self.weight_version

    def pause(self) -> None:
        """Stops generating and queues running sequences again."""
        self.paused = True
        sequences = list(self.rows.sequences)
        self._take_out(list(range(len(sequences))))
        for sequence in reversed(sequences):
            # In front of the queue, in their order; their prompt is computed again with what they
            # have generated, so they continue under whatever weights are loaded meanwhile.
            sequence.retractions += 1
            self._queue.appendleft([sequence])
        self.waiting += len(sequences)

    def resume(self) -> None:
        """Ends a pause. Raises RequestRefused while memory is released, or while resumed weights
        are not loaded yet.
        """
        self._refuse_without_memory()
        self.paused = False

    def _refuse_without_memory(self) -> None:
        if self.released or self._no_weights:
            raise RequestRefused(
                "the engine has released memory that it needs",
                field="tags",
                value=next(iter(self.released), "weights"),
                remedy="POST /resume_memory_occupation, then load the weights",
            )

    def release_memory(self, kinds: list[MemoryKind]) -> None:
        """Frees the KV cache, the weights or both, and pauses.

        Weights are lost. Changes nothing when it raises RequestRefused.
        """
        again = sorted(self.released.keys() & set(kinds))
        if again:
            raise RequestRefused(
                "this memory is already released",
                field="tags",
                value=again[0],
                remedy="POST /resume_memory_occupation first",
            )
        if self.rows.sequences:
            raise RequestRefused(
                "requests are still running",
                field="requests",
                value=len(self.rows.sequences),
                remedy="POST /pause_generation with mode retract",
            )
        if "weights" in kinds and self.adapters.paths():
            raise RequestRefused(
                "loaded adapters depend on these weights",
                field="tags",
                value="weights",
                remedy="unload the adapters, or leave weights out",
            )
        self.paused = True
        for kind in kinds:
            sizes = [(storage, storage.nbytes()) for storage in self.model.storages(kind)]
            for storage, _ in sizes:
                storage.resize_(0)
            self.released[kind] = sizes
        self.model.forget()

    def resume_memory(self, kinds: list[MemoryKind]) -> None:
        """Allocates released memory again; weights have no values until the next update. Raises
        RequestRefused.
        """
        other = sorted(set(kinds) - self.released.keys())
        if other:
            raise RequestRefused(
                "this memory was not released", field="tags", value=other[0], remedy="leave it out"
            )
        for kind in kinds:
            for storage, size in self.released.pop(kind):
                storage.resize_(size)
            if kind == "weights":
                self._no_weights = True
            else:
                self.model.cache.release()

    def update_weights(self, source: Path | dict[str, torch.Tensor], version: str | None) -> None:
        """Loads a directory of safetensors, or checked tensors, in place, while no row runs.

        Changes nothing when it raises BadWeights or RequestRefused.
        """
        if "weights" in self.released:
            raise RequestRefused(
                "the memory of the weights is released",
                field="tags",
                value="weights",
                remedy="POST /resume_memory_occupation",
            )
        with self.adapters.only(None):
            if isinstance(source, Path):
                load_into(self.model.module, source)
                self.model.path = source
            else:
                copy_tensors(self.model.module, source)
            self._no_weights = False
        if version is not None:
            self.weight_version = version
        if "kv_cache" not in self.released:
            self.model.cache.release()  # keys and values of the old weights; no row needs them

    def retire_adapter(self, name: str) -> None:
        """Refuses new requests for the adapter. Raises BadAdapter when it is not loaded."""
        if name not in self.adapters.paths():
            known = sorted(self.adapters.paths())
            reason = f"LoRA with name {name} does not exist. Loaded LoRAs: {known}"
            raise BadAdapter(reason, field="lora_name", value=name, remedy="name a loaded adapter")
        self.adapters.retired.add(name)

    def drop_adapter(self, name: str) -> bool:
        """Unloads a retired adapter; returns False while requests use it."""
        running = any(sequence.job.adapter == name for sequence in self.rows.sequences)
        waiting = any(group[0].job.adapter == name for group in self._queue)
        if running or waiting:
            return False
        self.adapters.drop(name)
        return True


def _not_finite(version: str) -> LogitsNotFinite:
    remedy = "look for a training step that diverged, and load other weights"
    return LogitsNotFinite(
        "the model's logits are not finite", field="weight_version", value=version, remedy=remedy
    )
