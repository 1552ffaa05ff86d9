"""Writes the model card of a run, and pushes models to the Hugging Face hub."""

import json
from pathlib import Path

from common import Json
from common.errors import ConfigError
from common.settings.config import Config
from trainer.evaluation.uncertainty import wilson_interval
from trainer.observe.run_dir import read_lines, read_settings
from trainer.policy.export import MODEL_FILES

# Sections whose settings a card shows.
_SECTIONS = ("model", "lora", "sampling", "algorithm", "optimizer", "parallel", "trainer")
# Settings of these sections that say nothing about training.
_OMITTED = ("name", "run_dir", "port")


def write_card(target: Path, run_dir: Path, problems: int) -> None:
    """Writes a saved model's README.md: data, settings, and accuracy with its interval.

    Args:
        target: directory of the model.
        run_dir: directory of its run.
        problems: number of training problems.
    """
    config = read_settings(run_dir)
    metrics = read_lines(run_dir / "metrics.jsonl")
    base = config["model"]["name"]
    algorithm = config["algorithm"]["name"]
    functions = ", ".join(f"`{name}`" for name in config["reward"]["functions"])
    rewards = ""
    if metrics:
        first = metrics[0]["reward"]
        last = metrics[-1]["reward"]
        rewards = f"Mean reward in training: {first:.3f} at the first step, {last:.3f} at the last."
    is_on_hub = "/" in base and not Path(base).exists()
    text = _CARD.format(
        base_model=f"base_model: {json.dumps(base)}\n" if is_on_hub else "",
        base=base,
        name=Path(base).name,
        algorithm=algorithm,
        steps=len(metrics),
        problems=problems,
        batch=config["trainer"]["batch_size"],
        group=config["sampling"]["group_size"],
        seed=config["seed"],
        functions=functions,
        results="\n".join(_results(read_lines(run_dir / "evaluations.jsonl"))),
        rewards=rewards,
        settings="\n".join(_changed_settings(config)),
    )
    (target / "README.md").write_text(text, encoding="utf-8")


_CARD = """\
---
{base_model}library_name: transformers
pipeline_tag: text-generation
tags: [rlhf-math, {algorithm}, reinforcement-learning]
---

# {name}, trained with {algorithm}

Trained from `{base}` for {steps} steps by reinforcement learning with rlhf-math.

## Data

{problems} training problems, {batch} a step with {group} completions of each, and the seed {seed}.
Reward functions: {functions}.

## Results

{results}

{rewards}

## Settings

Those that differ from the defaults:

| setting | value |
|---|---|
{settings}
"""


def _changed_settings(config: Json) -> list[str]:
    """Returns a row of the table for every setting that differs from its default."""
    defaults = Config().model_dump(mode="json")
    rows = []
    for section in _SECTIONS:
        for name, value in config[section].items():
            if name not in _OMITTED and value != defaults[section].get(name):
                rows.append(f"| `{section}.{name}` | `{json.dumps(value)}` |")
    return rows


def _results(evaluations: list[Json]) -> list[str]:
    """Returns a table of the first and the last evaluation."""
    if not evaluations:
        return ["It was not evaluated on held-out problems."]
    rows = [
        "| step | held-out problems | accuracy | 95 % interval (Wilson) | mean reward |",
        "|---|---|---|---|---|",
    ]
    for line in (evaluations[0], evaluations[-1]):
        count = line["num_samples"]
        problems = f"{count}"
        if line.get("trained_on"):
            problems += f", {line['trained_on']} of which were trained on"
        accuracy = line["accuracy"]
        shown = "rewards are not verdicts | "
        if accuracy is not None:
            answers = count * line["n"]
            low, high = wilson_interval(round(accuracy * answers), answers)
            shown = f"{accuracy:.3f} | {low:.3f} to {high:.3f}"
        rows.append(f"| {line['step']} | {problems} | {shown} | {line['mean_reward']:.3f} |")
    return rows


def push(directory: Path, name: str, private: bool | None, token: str | None) -> str | None:
    """Replaces the model in a repository of the hub by the one in `directory` and returns its URL;
    prints why and returns None if the hub cannot be reached.

    Raises ConfigError when the hub refuses it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi(token=token)
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=directory,
            commit_message="Model and card",
            delete_patterns=list(MODEL_FILES),  # of an older model there
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, ValueError) as error:
        raise ConfigError(
            f"the hub refuses it: {str(error).strip()}",
            field="hub_model_id",
            value=name,
            remedy=f"log in with `hf auth login`, or give hub_token; the model is in {directory}",
        ) from None
    except Exception as error:  # each version of the library has another HTTP client
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(
            f"not pushed: the hub cannot be reached ({reason}); the model and its card are in "
            f"{directory}"
        )
        return None
    return str(address)
