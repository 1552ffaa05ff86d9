"""Runs for the tests of the rollout viewer, with synthetic groups and lines in the form of
`groups.jsonl`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.wire.schemas import Completion, Group
from trainer.observe.group_files import LINES, GroupRecorder, RecordedGroup


def group(
    number: int,
    rewards: Sequence[float],
    texts: Sequence[str] = (),
    prompt: str = "How many?",
    **more: Any,
) -> Group:
    """Returns a group of completions with the tokens 3 to 9."""
    texts = texts or [f"text {i}" for i in range(len(rewards))]
    completions = [
        Completion(
            token_ids=np.arange(3, 10, dtype=np.int32),
            logprobs=np.linspace(-2.0, -0.1, 7).astype(np.float32),
            text=text,
            finish_reason="stop",
            weight_versions=[(number, 0, 4), (number + 1, 4, 7)],
            reward=reward,
            correct=reward > 0,
            extracted_answer=None if reward == 0 else "5",
            components={"math": reward, "format": None},
        )
        for reward, text in zip(rewards, texts, strict=True)
    ]
    tokens = np.array([3, 4], np.int32)
    return Group(
        id=f"group-{number}",
        prompt_id=f"prompt/{number % 3}",
        prompt=prompt,
        ground_truth="5",
        prompt_token_ids=tokens,
        completions=completions,
        position=number,
        **more,
    )


def trained(item: Group, shift: float = 0.01) -> RecordedGroup:
    """Returns the group with advantages, and with log-probabilities that differ by `shift`."""
    rewards = item.rewards - item.rewards.mean()
    advantages = [np.full(7, reward, np.float32) for reward in rewards]
    return RecordedGroup(
        item,
        advantages,
        [completion.logprobs + np.float32(shift) for completion in item.completions],
    )


def record(
    directory: Path,
    steps: Sequence[Sequence[RecordedGroup]],
    keep_bytes: int = 1 << 30,
    done: int = 0,
) -> None:
    """Records steps from `done` + 1 on."""
    directory.mkdir(parents=True, exist_ok=True)
    recorder = GroupRecorder(directory, keep_bytes, done)
    for step, items in enumerate(steps, done + 1):
        recorder.step(
            step,
            [item for item in items if not item.reason],
            [item for item in items if item.reason],
        )
    recorder.flush()


def entry(number: int, **more: Any) -> dict[str, Any]:
    """Returns a group in the form of its line."""
    rewards = [float(number % 5 > i) for i in range(4)]
    made = {
        "id": f"group-{number}",
        "prompt_id": f"prompt-{number % 1000}",
        "position": number,
        "prompt": f"What is {number % 1000} + 1?",
        "versions": [number // 32, number // 32],
        "reward": sum(rewards) / 4,
        "rewards": rewards,
        "correct": int(sum(rewards)),
        "tokens": [number % 97 + i for i in range(4)],
        "marks": ["unparsable"] if number % 7 == 0 else [],
        "advantage": 0.5,
        "delta": 1e-4 * (number % 10),
        "reused": False,
    }
    return made | more


def write_lines(directory: Path, first: int, steps: int, each: int = 32) -> None:
    """Appends lines of steps from `first` on."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LINES).open("a", encoding="utf-8") as file:
        for step in range(first, first + steps):
            groups = [entry((step - 1) * each + i) for i in range(each)]
            file.write(json.dumps({"step": step, "groups": groups}) + "\n")
