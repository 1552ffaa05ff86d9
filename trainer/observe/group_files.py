"""The groups of every step, trained on and dropped: a line in `groups.jsonl`, and in full a file in `groups/`.

A line has `step`, `groups` (those trained on, in the order of the batch) and, where there were any, `dropped`: what a list
shows and searches. `groups/step_000012.zip` has an msgpack document for each of them in the same order, `00000.msgpack`
first, so that one can be read without the others: the group as it travels (`common.wire`, arrays as raw little-endian bytes,
a reward that nobody gave as null), with `reused`, `weight`, `reason`, `detail`, and for every completion `advantages` and
`trainer_logprobs` (float32 of each token, or null). Whoever reads them needs no torch.
"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
from msgspec.structs import asdict

from common import wire
from common.errors import ServiceError
from common.schemas import Completion, Float32, Group
from trainer.observe.run_dir import append_line, storing_run

log = logging.getLogger(__name__)
DIRECTORY, LINES = "groups", "groups.jsonl"
_SEARCHED_CHARS = 1000
"""Of a prompt, in its line."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group of n completions and what the trainer made of it."""

    group: Group
    advantages: Sequence[Float32] = ()
    """n arrays [L]; none when it was not trained on."""
    logprobs: Sequence[Float32 | None] = ()
    """n arrays [L] of the policy before it was updated on the group, where something had to compute them; else None."""
    weight: float = 1.0
    """Importance weight of reuse."""
    reused: bool = False
    reason: str = ""
    """Why it was dropped; empty when it was trained on."""
    detail: str = ""


class GroupRecorder:
    """Writes both, the file in a thread of its own.

    Args:
        run_dir: of the run.
        keep_bytes: of all files in `groups/`; those of the oldest steps leave first. 0: there are none.
        step: the run goes on after this step; files of later ones are removed. (Lines: `run_dir.py`.)
    """

    def __init__(self, run_dir: Path, keep_bytes: int, step: int) -> None:
        self._run_dir, self._keep_bytes = run_dir, keep_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groups")
        self._writing: Future[None] | None = None
        self._sizes: dict[int, int] = {}
        """Bytes by step, the oldest first."""
        for partial in (run_dir / DIRECTORY).glob("*.partial"):
            partial.unlink()
        for number, path in sorted(recorded_steps(run_dir).items()):
            if number > step:
                path.unlink()
            else:
                self._sizes[number] = path.stat().st_size

    def step(self, step: int, trained: Sequence[RecordedGroup], dropped: Sequence[RecordedGroup]) -> None:
        """Records a step; returns before its file is written, and waits for that of the step before.

        Raises StorageFailed when there is no room for this one's line or that one's file.
        """
        line: dict[str, Any] = {"step": step, "groups": [_entry(item) for item in trained]}
        if dropped:
            line["dropped"] = [_entry(item) for item in dropped]
        append_line(self._run_dir / LINES, line)
        self.settle()
        if self._keep_bytes:
            self._writing = self._thread.submit(self._write, step, [*trained, *dropped])

    def settle(self) -> None:
        """Returns when everything is written. Raises StorageFailed when it cannot be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def leave(self, step: int, dropped: Sequence[RecordedGroup]) -> None:
        """The run ends with an error in this step, for which these groups may be the reason. Raises nothing of its own."""
        try:
            if dropped:
                self.step(step, (), dropped)
            self.settle()
        except ServiceError as error:
            log.error("the last groups are not recorded: %s", error)

    def _write(self, step: int, items: Sequence[RecordedGroup]) -> None:
        path = _path(self._run_dir, step)
        partial = path.with_suffix(".partial")
        with storing_run(path):
            path.parent.mkdir(exist_ok=True)
            try:
                with ZipFile(partial, "w", ZIP_DEFLATED, compresslevel=1) as file:
                    for place, item in enumerate(items):
                        entry = ZipInfo(_name(place))
                        entry.compress_type = ZIP_DEFLATED
                        file.writestr(entry, wire.encode(_document(item)), compresslevel=1)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            self._sizes[step] = path.stat().st_size
            while sum(self._sizes.values()) > self._keep_bytes:
                oldest = next(iter(self._sizes))
                _path(self._run_dir, oldest).unlink(missing_ok=True)
                del self._sizes[oldest]


def recorded_steps(run_dir: Path) -> dict[int, Path]:
    """The files that are there, by step."""
    found = (run_dir / DIRECTORY).glob("step_*.zip")
    return {int(number): path for path in found if (number := path.stem.removeprefix("step_")).isdecimal()}


def read_group(run_dir: Path, step: int, place: int) -> dict[str, Any] | None:
    """The group at this place of the step's line, arrays as lists; None when there is no file of that step (any more).

    Raises ServiceError when the file is damaged.
    """
    path = _path(run_dir, step)
    try:
        with ZipFile(path) as file:
            content = wire.unpack(file.read(_name(place)))
        return _plain(content)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever the damage leads to
        raise ServiceError(
            f"the groups of step {step} cannot be read: {error}",
            code="damaged",
            field="trainer.run_dir",
            value=str(path),
            remedy="restore that file from a copy, or remove it",
        ) from None


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / f"step_{step:06d}.zip"


def _name(place: int) -> str:
    return f"{place:05d}.msgpack"


def _entry(item: RecordedGroup) -> dict[str, Any]:
    """What `groups.jsonl` says of a group."""
    group, completions = item.group, item.group.completions
    versions = [version for completion in completions for version, _, _ in completion.weight_versions]
    rewards = [_reward(completion) for completion in completions]
    known = [reward for reward in rewards if reward is not None]
    entry: dict[str, Any] = {
        "id": group.id,
        "prompt_id": group.prompt_id,
        "position": group.position,
        "prompt": group.prompt[:_SEARCHED_CHARS],
        "versions": [min(versions), max(versions)] if versions else None,
        "reward": round(sum(known) / len(known), 4) if known and len(known) == len(rewards) else None,
        "rewards": [None if reward is None else round(reward, 4) for reward in rewards],
        "correct": sum(completion.correct for completion in completions),
        "tokens": [len(completion.token_ids) for completion in completions],
        "marks": sorted({mark for completion in completions for mark in _marks(completion)}),
        "advantage": _mean([np.abs(advantages) for advantages in item.advantages]),
        "delta": _mean(_differences(item)),
        "reused": item.reused,
    }
    return entry | {"reason": item.reason, "detail": item.detail} if item.reason else entry


def _marks(completion: Completion) -> list[str]:
    """What a person may look for."""
    cut = {"stop": [], "length": ["truncated"], "abort": ["aborted"]}[completion.finish_reason]
    return cut if completion.status == "ok" else [completion.status, *cut]


def _reward(completion: Completion) -> float | None:
    return None if math.isnan(completion.reward) else completion.reward


def _differences(item: RecordedGroup) -> list[Float32]:
    pairs = zip(item.group.completions, item.logprobs, strict=False)
    return [np.abs(theirs - completion.logprobs) for completion, theirs in pairs if theirs is not None]


def _mean(arrays: Sequence[Float32]) -> float | None:
    """Over all numbers; None where there are none, or one is not finite."""
    mean = float(np.concatenate(arrays).mean()) if arrays else math.nan
    return round(mean, 6) if math.isfinite(mean) else None


def _document(item: RecordedGroup) -> dict[str, Any]:
    content = asdict(item.group)
    content["completions"] = [asdict(completion) for completion in item.group.completions]
    for i, completion in enumerate(content["completions"]):
        logprobs = item.logprobs[i] if item.logprobs else None
        completion["text"] = completion["text"].encode("utf-8", "replace").decode()  # a dropped one was not checked
        completion["reward"] = _reward(item.group.completions[i])
        completion["advantages"] = item.advantages[i] if item.advantages else None
        completion["trainer_logprobs"] = logprobs
    more = {"reused": item.reused, "weight": item.weight, "reason": item.reason, "detail": item.detail}
    return content | more


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """A document with lists in the place of bytes."""
    content["prompt_token_ids"] = np.frombuffer(content["prompt_token_ids"], "<i4").tolist()
    for completion in content["completions"]:
        completion["token_ids"] = np.frombuffer(completion["token_ids"], "<i4").tolist()
        for name in ("logprobs", "advantages", "trainer_logprobs"):
            if completion[name] is not None:
                completion[name] = np.frombuffer(completion[name], "<f4").tolist()
    return content
