"""What runs when: admission, decoding, leaving, pausing, new weights. Single-threaded; `engine` gives it a thread."""

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from prometheus_client import Counter

from common.errors import ServiceError
from services.engine.adapters import Adapters, BadAdapter
from services.engine.jobs import ABORTED, ABORTED_WAITING, Job, Sequence, Ticket
from services.engine.model import Model
from services.engine.rows import Rows
from services.engine.stops import matched_stop
from services.engine.weights import copy_tensors, load_into

PauseMode = Literal["abort", "retract", "in_place"]
PREFILL_TOKENS = 16_384
"""Padded tokens of one prefill: bounds its memory and how long running rows wait for it."""


class NotFinite(ServiceError):
    """The model's output is not a number: nothing was sampled (500)."""

    code = "not_finite"


class Refused(ServiceError):
    """The call does not fit the state of the engine (400)."""

    status = 400
    code = "refused"


class Scheduler:
    """The queue, the running rows and the model.

    Args:
        max_running: rows decoded at once.
        weight_version: label of the weights loaded.
        generated, prefilled: count tokens.
    """

    def __init__(self, model: Model, max_running: int, weight_version: str, generated: Counter, prefilled: Counter) -> None:
        self.model, self.max_running, self.weight_version = model, max_running, weight_version
        self.generated, self.prefilled = generated, prefilled
        self.paused = False
        self.waiting = 0
        self.rows = Rows(max_running)
        self.adapters = Adapters(model.module)
        self._queue: deque[Ticket] = deque()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything, were it not paused."""
        return bool(self.rows.sequences or self._queue)

    def enqueue(self, jobs: list[Job]) -> None:
        """Puts jobs at the end of the queue; one that names an adapter which is not there fails."""
        for job in jobs:
            if job.adapter is not None and job.adapter not in self.adapters.paths():
                job.done.set_exception(BadAdapter("Got LoRA adapter that is not loaded", field="lora_path", value=job.adapter))
                continue
            self.waiting += job.n
            for start in range(0, job.n, self.max_running):
                self._queue.append(Ticket(job.sequences[start : start + self.max_running]))

    def step(self, admit: bool) -> None:
        """Prefills what fits (if `admit`), then one token for every running row."""
        if admit:
            self._admit()
        if self.rows.sequences:
            logits = self.model.decode(self.rows["token"], self.rows["position"])
            self.rows["position"].add_(1)
            self._advance(0, logits)

    def _admit(self) -> None:
        """Prefills waiting tickets in order, as many as fit, and gives each its first token."""
        while self._queue:
            batch = self._next_batch()
            if not batch:
                return
            prompts = [ticket.tokens for ticket in batch]
            scored = batch[0].sequences[0].job
            every = _wants_prompt_logprobs(batch[0])
            logits, cache = self.model.prefill(prompts, every_position=every)
            self.prefilled.inc(sum(map(len, prompts)))
            if every:
                log_probs = torch.log_softmax(logits[0, :-1], -1)
                following = torch.tensor(scored.prompt[1:], dtype=torch.long)
                scores = log_probs.gather(1, following[:, None])[:, 0]
                scored.prompt_logprobs = scores.tolist()
                # Adding 0 × score passes a score that is not finite on to the check of the logits.
                logits = logits[:, -1:] + 0 * scores.sum()
            owners = [index for index, ticket in enumerate(batch) for _ in ticket.sequences]
            sequences = [sequence for ticket in batch for sequence in ticket.sequences]
            first = len(self.rows)
            self.model.cache.fill(first, cache, owners, [len(prompt) for prompt in prompts])
            self.rows.add(sequences, [len(prompts[owner]) for owner in owners])
            for ticket in batch:
                for index, sequence in enumerate(ticket.sequences):
                    sequence.note_version(self.weight_version, len(sequence.tokens))
                    sequence.cached_tokens = len(sequence.job.prompt) if index else 0
            self._advance(first, logits[:, 0][torch.tensor(owners)])

    def _next_batch(self) -> list[Ticket]:
        batch: list[Ticket] = []
        longest, free = 0, self.max_running - len(self.rows)
        if not self.rows.sequences:
            self.adapters.merge(self._queue[0].adapter)
        while self._queue and len(self._queue[0].sequences) <= free:
            ticket = self._queue[0]
            alone = _wants_prompt_logprobs(ticket)
            longest = max(longest, len(ticket.tokens))
            if batch and (alone or (len(batch) + 1) * longest > PREFILL_TOKENS):
                break
            if ticket.adapter != self.adapters.active:  # all rows have the same weights: it waits until they are done
                break
            batch.append(self._queue.popleft())
            free -= len(ticket.sequences)
            self.waiting -= len(ticket.sequences)
            if alone:
                break
        return batch

    def _advance(self, first: int, logits: torch.Tensor) -> None:
        """One token for rows `first` and up; finished rows leave."""
        rows = self.rows
        stopped, full, finite = rows.append(first, logits)
        self.generated.inc(len(rows) - first)
        ended: dict[int, dict[str, Any] | None] = {}
        over = stopped | full | ~finite
        if bool(over.any()):
            ending = [first + row for row in over.nonzero()[:, 0].tolist()]
            rows.collect(ending)
            for row in ending:
                ended[row] = _reason(rows.sequences[row], bool(stopped[row - first])) if finite[row - first] else None
        watched = [row for row in range(first, len(rows)) if _is_watched(rows.sequences[row])]
        if watched:
            rows.collect(watched)
        streams = [rows.sequences[row] for row in watched if rows.sequences[row].job.on_token]
        for row in watched:
            running = row not in ended or (ended[row] or {}).get("type") == "length"
            if running and (matched := matched_stop(self.model.tokenizer, rows.sequences[row])) is not None:
                ended[row] = {"type": "stop", "matched": matched}
        if ended:
            self._end(ended)
        for sequence in streams:
            if sequence.finish is None and sequence.job.on_token and not sequence.job.done.done():
                sequence.job.on_token(sequence)

    def _end(self, ended: dict[int, dict[str, Any] | None]) -> None:
        """Takes rows out with their reason; None fails the whole job, as its numbers are not finite."""
        sequences = self.rows.sequences
        broken = {sequences[row].job for row, reason in ended.items() if reason is None}
        leaving = [row for row, sequence in enumerate(sequences) if row in ended or sequence.job in broken]
        if broken:
            self.model.cache.zero(leaving)
        finished = [(sequences[row], reason) for row, reason in ended.items() if sequences[row].job not in broken]
        self._drop(leaving)
        for sequence, reason in finished:
            assert reason is not None
            self._settle(sequence, reason)
        for job in broken:
            self._filter_queue(partial(_belongs, job))
            job.done.set_exception(
                NotFinite(
                    "the model's logits are not finite",
                    field="weight_version",
                    value=self.weight_version,
                    remedy="look for a diverged training step; load other weights",
                )
            )

    def _settle(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish, sequence.version = reason, self.weight_version
        job = sequence.job
        if job.on_token:
            job.on_token(sequence)
        if all(each.finish is not None for each in job.sequences):
            job.done.set_result(job.sequences)

    def _drop(self, leaving: list[int]) -> None:
        to, origin = self.rows.remove(leaving)
        if to:
            self.model.cache.move(to, origin)

    def abort(self, matches: Callable[[Sequence], bool]) -> None:
        """Finishes the sequences that match with what they have."""
        rows = [row for row, sequence in enumerate(self.rows.sequences) if matches(sequence)]
        stopped = [self.rows.sequences[row] for row in rows]
        if rows:
            self.rows.collect(rows)
            self._drop(rows)
        for sequence in stopped:
            self._settle(sequence, _aborted(ABORTED))
        for sequence in self._filter_queue(matches):
            self._settle(sequence, _aborted(ABORTED if sequence.tokens else ABORTED_WAITING))

    def _filter_queue(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Takes the sequences that match out of the queue."""
        removed = [sequence for ticket in self._queue for sequence in ticket.sequences if matches(sequence)]
        for ticket in self._queue:
            ticket.sequences = [sequence for sequence in ticket.sequences if not matches(sequence)]
        self._queue = deque(ticket for ticket in self._queue if ticket.sequences)
        self.waiting -= len(removed)
        return removed

    def pause(self, mode: PauseMode) -> None:
        """Stops; running rows are answered as they are (abort), go back to the queue (retract) or stay (in_place)."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract" and self.rows.sequences:
            sequences = list(self.rows.sequences)
            self.rows.collect(list(range(len(sequences))))
            self._drop(list(range(len(sequences))))
            for sequence in sequences:
                sequence.retractions += 1
            self._queue.extendleft(Ticket([sequence]) for sequence in reversed(sequences))
            self.waiting += len(sequences)

    def flush_cache(self) -> None:
        """Gives the memory of the KV cache back. Raises Refused while it is needed."""
        if self.rows.sequences or (self._queue and not self.paused):
            raise Refused(
                "Flush cache failed.",
                field="running",
                value=len(self.rows),
                remedy="wait for the requests, or pause with mode retract or abort",
            )
        self.model.cache.release()

    def update(self, path: Path, version: str | None, flush_cache: bool) -> int:
        """Loads weights in place; returns the sequences that were paused. Raises BadWeights or Refused, changing nothing."""
        self._refuse_to_flush(flush_cache)
        with self.adapters.apart():
            load_into(self.model.module, path)
        self.model.path = path
        self._loaded(version, flush_cache)
        return (len(self.rows) + sum(len(ticket.sequences) for ticket in self._queue)) if self.paused else 0

    def load_tensors(self, tensors: dict[str, torch.Tensor], version: str | None, flush_cache: bool) -> None:
        """Copies checked tensors into the model. Raises Refused, changing nothing."""
        self._refuse_to_flush(flush_cache)
        with self.adapters.apart():
            copy_tensors(self.model.module, tensors)
        self._loaded(version, flush_cache)

    def _refuse_to_flush(self, flush_cache: bool) -> None:
        if flush_cache and self.rows.sequences:
            raise Refused(
                "rows frozen by an in-place pause keep their cache",
                field="flush_cache",
                value=True,
                remedy="send flush_cache=false, or pause with mode retract or abort",
            )

    def _loaded(self, version: str | None, flush_cache: bool) -> None:
        if version is not None:
            self.set_version(version)
        if flush_cache:
            self.model.cache.release()

    def retire_adapter(self, name: str) -> None:
        """From now on no new request gets this adapter. Raises BadAdapter when it is not there."""
        if name not in self.adapters.paths():
            known = sorted(self.adapters.paths())
            raise BadAdapter(f"LoRA with name {name} does not exist. Loaded LoRAs: {known}", field="lora_name", value=name)
        self.adapters.leaving.add(name)

    def drop_adapter(self, name: str) -> bool:
        """Forgets a retired adapter; False while requests use it."""
        waiting = (sequence for ticket in self._queue for sequence in ticket.sequences)
        if any(sequence.job.adapter == name for sequence in (*self.rows.sequences, *waiting)):
            return False
        self.adapters.drop(name)
        return True

    def set_version(self, version: str) -> None:
        """Renames the weights; tokens from now on count as `version`."""
        self.weight_version = version
        for sequence, count in zip(self.rows.sequences, self.rows["count"].tolist(), strict=True):
            sequence.note_version(version, count)


def _belongs(job: Job, sequence: Sequence) -> bool:
    return sequence.job is job


def _wants_prompt_logprobs(ticket: Ticket) -> bool:
    first = ticket.sequences[0]
    return first.job.prompt_logprobs_from is not None and not first.tokens


def _is_watched(sequence: Sequence) -> bool:
    """Whether Python must look at every token of it."""
    return sequence.job.on_token is not None or bool(sequence.job.sampling.stop)


def _reason(sequence: Sequence, stopped: bool) -> dict[str, Any]:
    if stopped:
        return {"type": "stop", "matched": sequence.tokens[-1]}
    return {"type": "length", "length": len(sequence.tokens)}


def _aborted(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
