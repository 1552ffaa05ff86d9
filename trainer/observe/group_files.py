"""Records the groups of every step, trained on or dropped: summaries in `groups.jsonl`, full
content in `groups/`.

A line is a `StepGroups`. `groups/step_000012.zip` holds one msgpack document per group in the same
order, `00000.msgpack` first, so that one can be read without the others: the group in wire format
(`common.wire.codec`, arrays as raw little-endian bytes, a missing reward as null), with `reused`,
`weight`, `reason`, `detail`, and for every completion `advantages` and `trainer_logprobs` (float32
per token, or null). Reading needs no torch.
"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

import msgspec
import numpy as np
from msgspec.structs import asdict

from common import Json
from common.errors import ConfigError, ServiceError
from common.wire import codec
from common.wire.schemas import Completion, FinishReason, Float32, Group, RewardStatus
from trainer.observe.run_dir import DETAILS, append_line, damaged, storing_run, without

log = logging.getLogger(__name__)
DIRECTORY = "groups"
LINES = "groups.jsonl"
# The arrays that hold integers; the others hold float32.
_INTEGERS = frozenset({"token_ids", "mask", "prompt_ids", "prompt_token_ids"})
# Marks of completions by their `finish_reason`.
_ENDINGS = {"stop": "", "length": "truncated", "abort": "aborted"}
# Maximum characters of a prompt in `groups.jsonl`.
_SEARCHED_CHARS = 1000
EXCERPT_CHARS = 240
"""Characters of a completion that a list shows."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group of n completions with the trainer's results."""

    group: Group
    advantages: Sequence[Float32] = ()
    """n arrays [L]; empty when it was not trained on."""
    logprobs: Sequence[Float32 | None] = ()
    """n arrays [L] of the policy before the update on the group; None when not computed."""
    weight: float = 1.0
    """Importance weight of a reused group."""
    reused: bool = False
    reason: str = ""
    """Reason of the drop; empty when it was trained on."""
    detail: str = ""


class Beginning(msgspec.Struct):
    """What a list shows of a group's first completion."""

    text: str
    correct: bool | None


class GroupSummary(msgspec.Struct, kw_only=True):
    """A group in its line of `groups.jsonl`; those of earlier versions lack fields."""

    id: str
    prompt_id: str | None = None
    position: int | None = None
    prompt: str | None = None
    versions: tuple[int, int] | None = None
    """Oldest and newest weights that sampled a token."""
    reward: float | None = None
    """Mean over the completions; None when one of them was not graded."""
    rewards: list[float | None] = []
    correct: int | None = None
    tokens: list[int] | None = None
    """Length of every completion."""
    marks: list[str] = []
    advantage: float | None = None
    """Mean |advantage|."""
    delta: float | None = None
    """Mean |Δ logprob| of trainer and engine."""
    reused: bool = False
    reason: str = ""
    detail: str = ""
    first: Beginning | None = None


class StepGroups(msgspec.Struct):
    """A line of `groups.jsonl`."""

    step: int
    groups: list[GroupSummary] = []
    """Trained on, in batch order."""
    dropped: list[GroupSummary] = []


class GroupRecorder:
    """Writes the summaries, and in a thread the full content; removes an earlier attempt's files of
    steps after `step`.

    `keep_bytes` limits the total size of `groups/`: the oldest steps are removed first. 0: no
    files. With `whole` the files lack nothing that the trainer read (`read_trained`).
    """

    def __init__(self, run_dir: Path, keep_bytes: int, step: int, *, whole: bool = False) -> None:
        self._run_dir = run_dir
        self._whole = whole
        self._keep_bytes = keep_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groups")
        self._writing: Future[None] | None = None
        # File size in bytes by step, oldest first.
        self._sizes: dict[int, int] = {}
        for partial in (run_dir / DIRECTORY).glob("*.partial"):
            partial.unlink()
        for number, path in sorted(recorded_steps(run_dir).items()):
            if number > step:
                path.unlink()
            else:
                self._sizes[number] = path.stat().st_size

    def step(
        self, step: int, trained: Sequence[RecordedGroup], dropped: Sequence[RecordedGroup]
    ) -> None:
        """Records a step; returns before its file is written, but waits for the previous one.

        Raises StorageFailed when the disk is full for this line or the previous file.
        """
        line = StepGroups(step, list(map(_summary, trained)), list(map(_summary, dropped)))
        append_line(self._run_dir / LINES, msgspec.to_builtins(line))
        self.flush()  # one file at a time: a slow disk slows the run instead of filling memory
        if self._keep_bytes:
            self._writing = self._thread.submit(self._write, step, [*trained, *dropped])

    def flush(self) -> None:
        """Waits until everything is written. Raises StorageFailed if writing failed."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def abort(self, step: int, dropped: Sequence[RecordedGroup]) -> None:
        """Records the dropped groups of a step that failed, perhaps because of them; logs a write
        error.
        """
        try:
            if dropped:
                self.step(step, (), dropped)
            self.flush()
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
                        file.writestr(
                            entry, codec.encode(_document(item, self._whole)), compresslevel=1
                        )
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            self._sizes[step] = path.stat().st_size
            while sum(self._sizes.values()) > self._keep_bytes:
                oldest = next(iter(self._sizes))
                _path(self._run_dir, oldest).unlink(missing_ok=True)
                del self._sizes[oldest]


def recorded_steps(run_dir: Path) -> dict[int, Path]:
    """Returns the files in `groups/` by step."""
    paths: dict[int, Path] = {}
    for path in (run_dir / DIRECTORY).glob("step_*.zip"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            paths[int(number)] = path
    return paths


def read_group(run_dir: Path, step: int, place: int) -> Json | None:
    """Returns the group at index `place` of the step's line, arrays as lists; None when the step
    has no file.

    Raises ServiceError when the file is damaged.
    """
    path = _path(run_dir, step)
    try:
        with ZipFile(path) as file:
            content = _with_lists(codec.unpack(file.read(_name(place))))
            content["completions"] = list(map(_with_lists, content["completions"]))
            return content
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file fails in many ways
        raise ServiceError(
            f"the groups of step {step} cannot be read: {error}",
            code="damaged",
            field="trainer.run_dir",
            value=str(path),
            remedy="restore that file from a copy, or remove it",
        ) from None


def read_trained(run_dir: Path, step: int) -> list[RecordedGroup]:
    """Returns the groups that a step with `trainer.audit` was trained on, in batch order and
    exactly as the trainer read them.

    Raises ConfigError when the file is missing or damaged.
    """
    path = _path(run_dir, step)
    if not path.is_file():
        raise ConfigError(
            f"the groups of step {step} are not kept",
            field="trainer.keep_groups_mb",
            value=str(path),
            remedy="restore that file from a copy; a larger trainer.keep_groups_mb keeps more "
            "steps of later runs",
        )
    found = []
    name = ""
    try:
        with ZipFile(path) as file:
            for name in sorted(file.namelist()):
                content = codec.unpack(file.read(name))
                if not content["reason"]:  # the dropped ones follow
                    found.append(_recorded(content, name))
    except Exception as error:  # a damaged file fails in many ways
        raise damaged(f"the groups of step {step} cannot be read: {name} {error}", path) from None
    return found


def _recorded(content: Json, name: str) -> RecordedGroup:
    """Returns the group of a document, which is the reverse of `_document`."""
    of_group = {key: content.pop(key) for key in ("reused", "weight", "reason", "detail")}
    columns: dict[str, list[bytes | None]] = {}
    for key in ("advantages", "trainer_logprobs"):
        columns[key] = [completion.pop(key) for completion in content["completions"]]
    group = codec.from_plain(content, Group, name)

    def trained(key: str) -> list[Float32 | None]:
        return [
            None if spread is None else completion.trained(np.frombuffer(spread, "<f4"))
            for completion, spread in zip(group.completions, columns[key], strict=True)
        ]

    advantages = [each for each in trained("advantages") if each is not None]
    logprobs = trained("trainer_logprobs")
    return RecordedGroup(group=group, advantages=advantages, logprobs=logprobs, **of_group)


class CompletionText(msgspec.Struct):
    """A completion without its numeric arrays."""

    text: str = ""
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    correct: bool = False
    verified: bool = True
    status: RewardStatus = "ok"
    extracted_answer: str | None = None
    components: dict[str, float | None] = {}
    episode: int | None = None


class GroupTexts(msgspec.Struct):
    """A recorded group without its numeric arrays, but with the tokens of its prompt."""

    id: str = ""
    prompt_id: str = ""
    prompt: str = ""
    ground_truth: str = ""
    prompt_token_ids: bytes = b""
    completions: list[CompletionText] = []
    reused: bool = False
    reason: str = ""
    """Why it was dropped; empty when it was trained on."""

    @property
    def prompt_tokens(self) -> list[int]:
        """The token ids of the prompt, as the model read it."""
        return list(map(int, np.frombuffer(self.prompt_token_ids, "<i4")))

    @property
    def answers(self) -> list[int]:
        """The indices of one completion of each episode, as in `Group.answers`."""
        first: dict[int, int] = {}
        for index, completion in enumerate(self.completions):
            episode = -1 - index if completion.episode is None else completion.episode
            first.setdefault(episode, index)
        return list(first.values())


_TEXTS = msgspec.msgpack.Decoder(GroupTexts)


def read_texts(run_dir: Path, step: int) -> list[GroupTexts]:
    """Returns the texts of a step's groups in order; a damaged one is empty."""
    found = []
    with suppress(OSError, BadZipFile), ZipFile(_path(run_dir, step)) as file:
        for name in sorted(file.namelist()):
            try:
                found.append(_TEXTS.decode(file.read(name)))
            except Exception:  # a damaged file fails in many ways; opening the group reports how
                found.append(GroupTexts())
    return found


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / f"step_{step:06d}.zip"


def _name(place: int) -> str:
    return f"{place:05d}.msgpack"


def _summary(item: RecordedGroup) -> GroupSummary:
    group = item.group
    completions = group.completions
    rewards = [_reward(completion, digits=4) for completion in completions]
    mean = group.rewards.mean() if completions else math.nan
    verified = all(completion.verified for completion in completions)
    versions: list[int] = []
    marks = {"lost"} if group.lost_episodes else set()
    for completion in completions:
        versions += [version for version, _, _ in completion.weight_versions]
        marks |= {completion.status, _ENDINGS[completion.finish_reason]} - {"ok", ""}
    # |Δ logprob| of trainer and engine, of the completions that the trainer scored.
    differences = [
        np.abs(logprobs - completion.trained(completion.logprobs))
        for completion, logprobs in zip(completions, item.logprobs, strict=False)
        if logprobs is not None
    ]
    first = None
    if completions:
        has_verdict = completions[0].verified and rewards[0] is not None
        words = _valid(completions[0].text[: 2 * EXCERPT_CHARS]).split()
        first = Beginning(
            text=" ".join(words)[:EXCERPT_CHARS],
            correct=completions[0].correct if has_verdict else None,
        )
    return GroupSummary(
        id=group.id,
        prompt_id=group.prompt_id,
        position=group.position,
        prompt=group.prompt[:_SEARCHED_CHARS],
        versions=(min(versions), max(versions)) if versions else None,
        reward=None if math.isnan(mean) else round(float(mean), 4),
        rewards=rewards,
        correct=sum(completion.correct for completion in completions) if verified else None,
        tokens=[len(completion.token_ids) for completion in completions],
        marks=sorted(marks),
        advantage=_mean([np.abs(advantages) for advantages in item.advantages]),
        delta=_mean(differences),
        reused=item.reused,
        reason=item.reason,
        detail=item.detail,
        first=first,
    )


def _valid(text: str) -> str:
    """Replaces lone surrogates, which the text of a dropped group may have: it was not checked."""
    return text.encode("utf-8", "replace").decode()


def _reward(completion: Completion, digits: int | None = None) -> float | None:
    """Returns the reward; None without one."""
    if math.isnan(completion.reward):
        return None
    return completion.reward if digits is None else round(completion.reward, digits)


def _mean(arrays: Sequence[Float32]) -> float | None:
    """Returns the mean of all numbers; None if there are none or one is not finite."""
    mean = float(np.concatenate(arrays).mean()) if arrays else math.nan
    return round(mean, 6) if math.isfinite(mean) else None


def _document(item: RecordedGroup, whole: bool) -> Json:
    left_out = frozenset[str]() if whole else DETAILS
    completions = []
    for index, completion in enumerate(item.group.completions):
        logprobs = item.logprobs[index] if item.logprobs else None
        advantages = completion.spread(item.advantages[index]) if item.advantages else None
        completions.append(
            without(left_out, asdict(completion))
            | {
                "text": _valid(completion.text),
                "reward": _reward(completion),
                "advantages": advantages,
                "trainer_logprobs": None if logprobs is None else completion.spread(logprobs),
            }
        )
    of_group = {name: getattr(item, name) for name in ("reused", "weight", "reason", "detail")}
    content = without(left_out, asdict(item.group))
    return {**content, **of_group, "completions": completions}


def _with_lists(content: Json) -> Json:
    """Returns a document without sampling details; its arrays, which are bytes, become lists."""
    shown = without(DETAILS, content)
    for name, value in shown.items():
        if isinstance(value, bytes):
            kind = "<i4" if name in _INTEGERS else "<f4"
            shown[name] = np.frombuffer(value, kind).tolist()
    return shown
