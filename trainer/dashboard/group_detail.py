"""One group in full, from the run directory or the replay-buffer."""

import math
from pathlib import Path
from typing import Any

from common.errors import NotFound, ServiceError
from common.wire.codec import plain
from trainer.dashboard.replay import Replay
from trainer.dashboard.tokens import TokenTexts
from trainer.observe.group_files import read_group

_GROUP = ("id", "prompt_id", "prompt", "ground_truth", "epoch", "position", "metadata")
_COMPLETION = (
    "text",
    "token_ids",
    "reward",
    "finish_reason",
    "weight_versions",
    "extracted_answer",
    "mask",
    "episode",
)
"""What is passed on as it is."""


def group_detail(
    run_dir: Path, row: dict[str, Any], replay: Replay | None, texts: TokenTexts | ServiceError
) -> dict[str, Any]:
    """Returns the full group of a row of the index; `missing` lists what is unknown.

    Raises NotFound with the reason when the content of the group is gone.
    """
    missing = []
    content, why = _from_run(run_dir, row)
    source = "run"
    if content is None:
        source = "replay"
        content = _from_replay(row, replay, why)
        missing.append(f"advantages and the trainer's log-probabilities: {why}")
    elif not row["reason"]:
        scored = [item["trainer_logprobs"] is not None for item in content["completions"]]
        if not all(scored):
            missing.append(
                "the trainer's log-probabilities of some completions: not needed without an "
                "advantage"
            )
    known = texts if isinstance(texts, TokenTexts) else None
    if isinstance(texts, ServiceError):
        missing.append(f"the texts of tokens: {texts.message}")
    return {
        **{name: content[name] for name in _GROUP},
        **{name: row[name] for name in ("step", "reused", "reason", "detail", "marks")},
        "lost_episodes": content.get("lost_episodes", []),
        "source": source,
        "missing": missing,
        "created_at": content["created_at"] or None,
        "weight": content.get("weight"),
        "prompt_tokens": None if known is None else known.texts(content["prompt_token_ids"]),
        "completions": [_completion(item, known) for item in content["completions"]],
    }


def _completion(item: dict[str, Any], texts: TokenTexts | None) -> dict[str, Any]:
    mask = item.get("mask")
    advantages = _trained(item.get("advantages"), mask)
    same = not advantages or all(number == advantages[0] for number in advantages)
    graded = item["reward"] is not None
    prompt_tokens = None
    if texts is not None and item.get("prompt_ids") is not None:
        prompt_tokens = texts.texts(item["prompt_ids"])
    return {
        **{name: item.get(name) for name in _COMPLETION},
        "logprobs": _shown(item["logprobs"], mask),
        "tokens": None if texts is None else texts.texts(item["token_ids"]),
        "special": [] if texts is None else texts.special(item["token_ids"]),
        "trainer_logprobs": _shown(item.get("trainer_logprobs"), mask),
        "advantage": _mean(advantages),
        "advantages": None if same else _shown(item.get("advantages"), mask),
        "correct": item["correct"] if graded and item.get("verified", True) else None,
        "status": item["status"] if graded or item["status"] != "ok" else None,
        "components": item.get("components", {}),
        "turns": [[turn["start"], turn["end"]] for turn in item.get("turns") or []],
        "prompt_tokens": prompt_tokens,
    }


def _trained(numbers: list[float] | None, mask: list[int] | None) -> list[float] | None:
    """Returns the numbers of tokens that are trained."""
    if numbers is None or mask is None:
        return numbers
    return [each for each, kept in zip(numbers, mask, strict=True) if kept]


def _shown(numbers: list[float] | None, mask: list[int] | None) -> list[float | None] | None:
    """Returns a number for every token, None for tokens of a tool or the environment."""
    if numbers is None or mask is None:
        return None if numbers is None else [*numbers]
    return [each if kept else None for each, kept in zip(numbers, mask, strict=True)]


def _mean(numbers: list[float] | None) -> float | None:
    mean = math.fsum(numbers) / len(numbers) if numbers else math.nan
    return mean if math.isfinite(mean) else None


def _from_run(run_dir: Path, row: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Returns the content of the group's file, or None and the reason."""
    if row["step"] is None:
        return None, "no step of the run directory has this group"
    try:
        content = read_group(run_dir, row["step"], row["place"])
    except ServiceError as error:
        return None, f"{error.message} ({error.value})"
    if content is None:
        return None, (
            f"groups/ has no file of step {row['step']}: it was removed to make room "
            "(trainer.keep_groups_mb), is not written yet, or never was"
        )
    if content["id"] != row["id"]:
        return None, f"the file of step {row['step']} belongs to another attempt"
    return content, ""


def _from_replay(row: dict[str, Any], replay: Replay | None, why: str) -> dict[str, Any]:
    """Returns the group from the replay-buffer. Raises NotFound with the reasons why it is in
    neither place.
    """
    there = "the group has left the replay-buffer, or no replay-buffer is running"
    try:
        group = replay.group(row["id"]) if replay else None
        if group is not None:
            return plain(group)
    except ServiceError as error:
        there = error.message
    raise NotFound(
        f"the group is known, but its content is not: {why}; {there}",
        code="evicted",
        field="id",
        value=row["id"],
        remedy="raise trainer.keep_groups_mb and replay.capacity for later runs; look at groups "
        "while the run is going on",
    )
