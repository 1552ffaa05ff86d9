"""Writes the model card of a run, and pushes models to the Hugging Face hub."""

import json
import shutil
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from trainer.evaluation.statistics import wilson_interval
from trainer.observe.run_dir import read_lines

_SETTINGS = ("model", "lora", "sampling", "algorithm", "trainer")
_LEAST = ("name", "run_dir", "port")


def write_card(target: Path, run_dir: Path, problems: int) -> None:
    """Writes a saved model's README.md: data, settings, curves, and accuracy with its interval."""
    metrics, evaluations = (
        read_lines(run_dir / f"{name}.jsonl") for name in ("metrics", "evaluations")
    )
    config = json.loads((run_dir / "config.json").read_text())
    curves = run_dir / "curves.png"
    if curves.exists():
        shutil.copy(curves, target / "curves.png")
    (target / "README.md").write_text(
        card(config, metrics, evaluations, curves.exists(), problems), encoding="utf-8"
    )


def card(
    config: dict[str, Any],
    metrics: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    curves: bool,
    problems: int,
) -> str:
    """Returns the text of a model card."""
    from common.settings.config import Config  # for the defaults, which the card omits

    base, algorithm = config["model"]["name"], config["algorithm"]["name"]
    named = "/" in base and not Path(base).exists()
    head = [
        "---",
        *([f"base_model: {json.dumps(base)}"] if named else []),
        "library_name: transformers",
    ]
    head += [
        "pipeline_tag: text-generation",
        f"tags: [rlhf-math, {algorithm}, reinforcement-learning]",
        "---",
    ]
    lines = [*head, "", f"# {Path(base).name}, trained with {algorithm}", ""]
    lines += [
        f"Trained from `{base}` for {len(metrics)} steps by reinforcement learning with rlhf-math.",
        "",
        "## Data",
        "",
    ]
    group, batch = config["sampling"]["group_size"], config["trainer"]["batch_size"]
    lines += [
        f"{problems} training problems, {batch} a step with {group} completions of each, and the seed {config['seed']}."
    ]
    functions = ", ".join(f"`{name}`" for name in config["reward"]["functions"])
    lines += [f"Reward functions: {functions}.", "", "## Results", "", *_results(evaluations)]
    if metrics:
        lines += [
            "",
            f"Mean reward in training: {metrics[0]['reward']:.3f} at the first step, {metrics[-1]['reward']:.3f} at the last.",
        ]
    lines += ["", "![curves](curves.png)"] if curves else []
    lines += [
        "",
        "## Settings",
        "",
        "Those that differ from the defaults:",
        "",
        "| setting | value |",
        "|---|---|",
    ]
    defaults = Config().model_dump(mode="json")
    for section in _SETTINGS:
        for name, value in config[section].items():
            if name not in _LEAST and value != defaults[section].get(name):
                lines.append(f"| `{section}.{name}` | `{json.dumps(value)}` |")
    return "\n".join(lines) + "\n"


def _results(evaluations: list[dict[str, Any]]) -> list[str]:
    if not evaluations:
        return ["It was not evaluated on held-out problems."]
    rows = [
        "| | step | held-out problems | accuracy | 95 % interval (Wilson) | mean reward |",
        "|---|---|---|---|---|---|",
    ]
    for when, line in zip(("before", "after"), (evaluations[0], evaluations[-1]), strict=True):
        count, accuracy = line["num_samples"], line["accuracy"]
        shown = ["rewards are not verdicts", ""]
        if accuracy is not None:
            answers = count * line.get("n", 1)
            low, high = wilson_interval(round(accuracy * answers), answers)
            shown = [f"{accuracy:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append(
            f"| {when} | {line['step']} | {count} | {' | '.join(shown)} | {line['mean_reward']:.3f} |"
        )
    return rows


def push(directory: Path, name: str, private: bool | None, token: str | None) -> str | None:
    """Uploads a directory to the hub and returns its URL; prints why and returns None if the hub
    cannot be reached.

    Raises ConfigError when the hub refuses it.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(token=token)
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=directory, commit_message="Model and card"
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, ValueError) as error:
        remedy = f"log in with `hf auth login`, or give hub_token; the model is in {directory}"
        raise ConfigError(
            f"the hub refuses it: {str(error).strip()}",
            field="hub_model_id",
            value=name,
            remedy=remedy,
        ) from None
    except (OfflineModeIsEnabled, httpx.TransportError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(
            f"not pushed: the hub cannot be reached ({reason}); the model and its card are in {directory}"
        )
        return None
    return str(address)
