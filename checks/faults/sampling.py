"""Faults of sampling: groups that cannot teach, answers that are cut or collapse."""

import json
import shutil
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import Answers, Chat, Lab, texts

_STEPS = 14


@fault(
    "sampling is nearly greedy, so the answers of a group are the same",
    r"identical|the same|equal|duplicate",
    r"completions?|answers?|samples?|groups?",
    r"temperature|greedy",
    reported="https://github.com/huggingface/trl/issues/5783",
    in_steps=True,
)
def sampling_near_greedy(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(sampling__temperature=0.01, trainer__max_steps=_STEPS))


@fault(
    "all answers of a group are sampled with one seed, so they are the same",
    r"identical|the same|equal|duplicate",
    r"completions?|answers?|samples?",
    r"seed",
    reported="https://github.com/huggingface/trl/issues/5783",
    in_steps=True,
)
def sampling_one_seed(lab: Lab) -> None:
    def change(number: int, body: dict[str, Any], answers: Answers) -> Answers:
        if number < lab.first_call:
            return answers
        lab.strike()
        return [answers[0]] * len(answers)

    lab.train(lab.settings(trainer__max_steps=_STEPS), change)


@fault(
    "dynamic sampling filters all groups, because their rewards are equal",
    r"dynamic[ _]sampling",
    r"equal|same",
)
def sampling_all_filtered(lab: Lab) -> None:
    lab.strike()
    config = lab.settings(
        algorithm__dynamic_sampling=True,
        algorithm__dynamic_sampling_rounds=4,
        sampling__temperature=0.01,
        trainer__max_steps=_STEPS,
    )
    lab.train(config)


@fault(
    "the token budget is too small: nearly all answers are cut",
    r"cut|truncat",
    r"max_new_tokens|max_completion_length",
    reported="https://github.com/huggingface/trl/pull/5759",
    in_steps=True,
)
def sampling_small_budget(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(sampling__max_new_tokens=4, trainer__max_steps=_STEPS))


@fault(
    "the model's end token is not the one that it was trained with: no answer ends",
    r"end|stop|eos",
    r"token",
    r"no |none|never|wrong|other|all|100 ?%",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/1120",
    in_steps=True,
)
def sampling_wrong_end_token(lab: Lab) -> None:
    model = lab.directory / "model"
    shutil.copytree(lab.model, model)
    lab.strike()
    lab.train(lab.settings(model__name=model, sampling__ignore_eos=True, trainer__max_steps=_STEPS))


@fault(
    "prompt and answer together do not fit into the context",
    r"max_new_tokens",
    r"max_context_tokens|context",
)
def sampling_beyond_context(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(sampling__max_new_tokens=400))


@fault("a temperature of 0 in training", r"temperature", r"greater|above|positive|0")
def sampling_temperature_zero(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(sampling__temperature=0))


@fault(
    "a group of one answer has nothing to compare with",
    r"group_size|num_generations",
    r"compare|at least|2|group",
    reported="https://github.com/huggingface/trl/issues/3857",
)
def sampling_group_of_one(lab: Lab) -> None:
    lab.strike()
    lab.train(lab.settings(sampling__group_size=1))


@fault(
    "the prompts are far too easy: every answer is right",
    r"too easy|all answers are right",
    in_steps=True,
    reported="https://github.com/huggingface/trl/pull/5598",
)
def sampling_too_easy(lab: Lab) -> None:
    def has_digit(completions: list[Chat], **columns: Any) -> list[float]:
        lab.strike()
        return [float(any(map(str.isdigit, text))) for text in texts(completions)]

    has_digit.gives_verdicts = True  # type: ignore[attr-defined]
    lab.script(has_digit)


@fault(
    "the prompts are far too hard: every answer is wrong",
    r"too hard|all answers are wrong",
    in_steps=True,
    reported="https://github.com/huggingface/trl/issues/3452",
)
def sampling_too_hard(lab: Lab) -> None:
    folder = lab.directory / "data"
    folder.mkdir()
    for name in ("train", "test"):
        rows = [
            {
                "question": row["prompt"][0]["content"],
                "answer": str(10_000 + int(row["ground_truth"])),
            }
            for row in lab.rows(64)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lab.strike()
    lab.train(lab.settings(data__source=folder, trainer__max_steps=_STEPS))
