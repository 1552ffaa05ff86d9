"""One group in full, from the run directory."""

import math
from pathlib import Path

from common import Json
from common.errors import NotFound, ServiceError
from trainer.dashboard.tokens import TokenTexts
from trainer.observe.group_files import read_group

_GROUP = ("id", "prompt_id", "prompt", "ground_truth", "epoch", "position", "metadata")
# What is passed on as it is.
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


def group_detail(run_dir: Path, row: Json, texts: TokenTexts | ServiceError) -> Json:
    """Returns the full group of a row of the index; `missing` lists what is unknown.

    Raises NotFound with the reason when the content of the group is gone.
    """
    content = _content(run_dir, row)
    missing = []
    scored = [item["trainer_logprobs"] is not None for item in content["completions"]]
    if not row["reason"] and not all(scored):
        missing.append(
            "the trainer's log-probabilities of some completions: not needed without an advantage"
        )
    if isinstance(texts, ServiceError):
        missing.append(f"the texts of tokens: {texts.message}")
    known = texts if isinstance(texts, TokenTexts) else None
    completions = [_completion(item, known) for item in content["completions"]]
    for index, grade in (row["regraded"] or {"grades": {}})["grades"].items():
        completions[int(index)]["regraded"] = grade
    return {
        **{name: content[name] for name in _GROUP},
        **{name: row[name] for name in ("step", "reused", "reason", "detail", "marks")},
        "lost_episodes": content["lost_episodes"],
        "missing": missing,
        "created_at": content["created_at"] or None,
        "weight": content["weight"],
        "prompt_tokens": _token_texts(content["prompt_token_ids"], known),
        "completions": completions,
    }


def _completion(item: Json, texts: TokenTexts | None) -> Json:
    mask = item.get("mask")
    advantages = _of_trained(item.get("advantages"), mask)
    known = [each for each in advantages or () if each is not None]
    mean = math.fsum(known) / len(known) if known else math.nan
    is_graded = item["reward"] is not None
    return {
        **{name: item.get(name) for name in _COMPLETION},
        "logprobs": _of_trained(item["logprobs"], mask),
        "tokens": _token_texts(item["token_ids"], texts),
        "special": texts.special(item["token_ids"]) if texts else [],
        "trainer_logprobs": _of_trained(item.get("trainer_logprobs"), mask),
        "advantage": mean if math.isfinite(mean) else None,
        # Only a critic gives the tokens of a completion different advantages.
        "advantages": advantages if len(set(known)) > 1 else None,
        "correct": item["correct"] if is_graded and item.get("verified", True) else None,
        "status": item["status"] if is_graded or item["status"] != "ok" else None,
        "components": item.get("components", {}),
        "turns": [[turn["start"], turn["end"]] for turn in item.get("turns") or []],
        "prompt_tokens": _token_texts(item.get("prompt_ids"), texts),
    }


def _token_texts(token_ids: list[int] | None, texts: TokenTexts | None) -> list[str] | None:
    return None if texts is None or token_ids is None else texts.texts(token_ids)


def _of_trained(numbers: list[float] | None, mask: list[int] | None) -> list[float | None] | None:
    """Returns a number for every token, None for tokens of a tool or the environment."""
    if numbers is None or mask is None:
        return None if numbers is None else [*numbers]
    return [each if kept else None for each, kept in zip(numbers, mask, strict=True)]


def _content(run_dir: Path, row: Json) -> Json:
    """Returns the content of the group's file. Raises NotFound with the reason when it is gone."""
    step = row["step"]
    try:
        content = read_group(run_dir, step, row["place"])
        if content is None:
            removed = "it was removed to make room (trainer.keep_groups_mb)"
            why = f"groups/ has no file of step {step}: {removed}, is not written yet, or never was"
        elif content["id"] == row["id"]:
            return content
        else:
            why = f"the file of step {step} belongs to another attempt"
    except ServiceError as error:
        why = f"{error.message} ({error.value})"
    raise NotFound(
        f"the group is known, but its content is not: {why}",
        code="evicted",
        field="id",
        value=row["id"],
        remedy="raise trainer.keep_groups_mb for later runs; look at groups while the run is going "
        "on",
    )
