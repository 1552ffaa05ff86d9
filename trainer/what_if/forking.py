"""What a fork begins with: the state of the run after a step, and the answers that stay valid."""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from common import Json
from common.errors import ConfigError
from common.settings.config import Config, from_mapping
from common.settings.rewards import BUILT_IN
from common.wire.schemas import Completion, Group
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from services.data.loaders import load_split
from services.reward.service import RewardService
from trainer.audit.history import WeightHistory, models_after
from trainer.audit.recorded import config_of
from trainer.cli.commands import argument_names
from trainer.observe.audit import AuditedStart, AuditRecord, Given, Setup
from trainer.observe.group_files import LINES, read_texts, read_trained, recorded_steps
from trainer.observe.problems import Problems, kept_problems
from trainer.observe.run_dir import (
    ATTEMPTS,
    AUDIT,
    append_line,
    damaged,
    read_lines,
    read_settings,
    reward_names,
)
from trainer.policy import checkpoint
from trainer.policy.checkpoint import Checkpoints, RunState
from trainer.policy.identity import identity
from trainer.policy.trained_prompts import TRAINED_PROMPTS, TrainedPrompts
from trainer.rollouts.requests import sampling_seed
from trainer.trackers.base import flatten

_CHANGES_ANSWERS = ("sampling.", "model.", "data.", "environment.", "rollout.", "lora.", "seed")
"""Settings with which an engine would have given other answers."""
_DESCRIBED_BY: dict[Given, tuple[str, str]] = {
    "prompts": ("data.source", "problems.jsonl"),
    "rewards": ("reward.functions", """'["my_rewards:correct"]'"""),
    "environment": ("environment.name", "my_environment:Environment"),
}
"""The setting that describes a part which a program gave, and a value in a shell."""
RecordedGroups = dict[tuple[int, ...], tuple[int, Group]]
"""Groups with their steps, by what asked for them: seed, number of answers and prompt tokens."""


@dataclass(frozen=True)
class Fork:
    """What a fork trains with."""

    config: Config
    problems: Problems | None
    """Those that a program gave the run; None for those of the settings."""
    answers: "RecordedAnswers"


def prepared(
    run_dir: Path, step: int, output: Path, changes: Mapping[str, Any], *, needs_settings: bool
) -> Fork:
    """Writes the directory of a fork.

    `needs_settings`: settings have to describe the whole fork, since a job group trains it. Raises
    ConfigError.
    """
    record = AuditRecord(run_dir) if (run_dir / AUDIT).exists() else None
    start = _recorded_start(run_dir) if record is None else record.start(record.step(step))
    has_other_data = any(name.startswith("data.") for name in changes)
    problems: Problems | None = None
    if "prompts" in start.given and not has_other_data and not needs_settings:
        problems = kept_problems(run_dir)
    for part in start.given:
        name, example = _DESCRIBED_BY[part]
        if name not in changes and not (part == "prompts" and problems):
            raise ConfigError(
                f"the {part} of this run came from a program, and no setting describes them",
                field=f"--set {name}",
                remedy=f"describe them, as in --set {name}={example}",
            )
    parent = config_of(start, run_dir)
    content = flatten(parent.model_dump(mode="json")) | {
        "trainer.device": start.config["trainer"]["device"],
        **changes,
        "trainer.run_dir": str(output),
        "state_dir": str(output / "state"),
    }
    with argument_names({}):
        config = from_mapping(content)
        if not needs_settings:
            # What the services refuse, before updates are computed again.
            RewardService(config.reward)
            if problems is None:
                load_split(config.data, "train", config.seed)
    known: RecordedGroups = {}
    if not any(name.startswith(_CHANGES_ANSWERS) for name in changes):
        known = valid_groups(run_dir, parent, step)
    _begin(run_dir, start, config, step, record=record, from_start=has_other_data)
    return Fork(config, problems, RecordedAnswers(known))


def valid_groups(run_dir: Path, config: Config, step: int) -> RecordedGroups:
    """Returns the groups of later steps that the weights up to `step` sampled alone, with their
    steps, by the request that asked for them. None of episodes, whose calls depend on tools, or
    with truncated sampling.
    """
    found: RecordedGroups = {}
    if config.environment.name or config.sampling.truncation():
        return found
    window = range(step + 1, step + 2 + config.trainer.max_staleness)
    for later in recorded_steps(run_dir).keys() & window:
        for item in read_trained(run_dir, later):
            newest = max(
                span[0] for each in item.group.completions for span in each.weight_versions
            )
            if newest > step or item.reused:
                continue
            group = item.group
            request = (
                sampling_seed(config.seed, group.position),
                len(group.completions),
                *group.prompt_token_ids.tolist(),
            )
            found[request] = later, group
    return found


class RecordedAnswers(httpx.AsyncBaseTransport):
    """The connection to the engine of a fork: a request that the run has recorded gets the recorded
    answer, any other goes to the engine.
    """

    def __init__(self, known: RecordedGroups) -> None:
        self._known = known
        self.used: dict[int, int] = {}
        """The steps of the recorded groups that were used, by their positions."""

    def before(self, app: FastAPI) -> httpx.AsyncBaseTransport:
        """Makes `app` the engine that gets the other requests; returns this transport."""
        self._engine = httpx.ASGITransport(app)
        return self

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            body = orjson.loads(await request.aread())
            sampling = body["sampling_params"]
            asked = (sampling.get("sampling_seed"), sampling.get("n", 1), *body["input_ids"])
            if asked in self._known:
                step, group = self._known.pop(asked)
                self.used[group.position] = step
                return httpx.Response(200, json=[_answer(each) for each in group.completions])
        return await self._engine.handle_async_request(request)


def _answer(completion: Completion) -> Json:
    """Returns a recorded completion as the engine answered it."""
    tokens = completion.token_ids.tolist()
    pairs = zip(completion.logprobs.tolist(), tokens, strict=True)
    spans = [
        {"version": str(version), "start": start, "end": end}
        for version, start, end in completion.weight_versions
    ]
    meta = {
        "finish_reason": {"type": completion.finish_reason},
        "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        "weight_version": spans[-1]["version"],
        "weight_versions": spans,
    }
    return {"text": completion.text, "output_ids": tokens, "meta_info": meta}


def _recorded_start(run_dir: Path) -> AuditedStart:
    """Returns what a run without an audit record says of its newest attempt."""
    # `save_model` may have added the configuration of the model.
    found = read_settings(run_dir)
    content = {name: found[name] for name in Config.model_fields if name in found}
    attempt = read_lines(run_dir / ATTEMPTS)[-1]
    given: list[Given] = []
    if attempt["data"] != content["data"]["source"]:
        given.append("prompts")
    if not all(name in BUILT_IN or ":" in name for name in reward_names(content)):
        given.append("rewards")
    return AuditedStart(
        step=0,
        run_id=attempt["run_id"],
        config=content,
        setup=Setup(
            packages={},
            world_size=1,
            threads=1,
            device=content["trainer"]["device"],
            instructions="",
        ),
        weights="",
        engine="",
        given=given,
    )


def _begin(
    run_dir: Path,
    start: AuditedStart,
    fork: Config,
    step: int,
    *,
    record: AuditRecord | None,
    from_start: bool,
) -> None:
    """Writes the directory of a fork as it was after `step`: a checkpoint, and the lines of steps.

    `from_start`: its prompts are others, so their stream begins anew.
    """
    output = fork.trainer.run_dir
    assert output is not None
    saved = checkpoint.newest(run_dir / "checkpoints", at_most=step)
    state = RunState(step=0, position=0, run_id=start.run_id, kl_coef=0.0)
    if saved is not None:
        state = checkpoint.load_state(checkpoint.read_state(saved), saved)
    changes: Json = {"identity": identity(fork)}
    history: WeightHistory | None = None
    if state.step < step:
        if record is None:
            raise damaged("the checkpoint of this step is incomplete", run_dir / "checkpoints")
        config = config_of(start, run_dir)
        with reproducible_numbers(config.reproducible):
            history = models_after(record, run_dir, config, step)

    output.mkdir(parents=True)
    shutil.copytree(run_dir / "model", output / "model")
    # What a job group that goes on with it compares its settings with.
    (output / "config.json").write_text(fork.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for name in ("metrics.jsonl", LINES, "samples.jsonl", "evaluations.jsonl", AUDIT):
        for line in read_lines(run_dir / name):
            if line["step"] <= step:
                append_line(output / name, line)

    done = set() if from_start else _finished(output, state)
    changes["position"] = next(place for place in itertools.count() if place not in done)
    changes["finished"] = sorted(place for place in done if place > changes["position"])
    target = output / "checkpoints"
    if history is not None:
        changes |= {"step": step, "kl_coef": history.policy.kl_coef}
        changes |= {"accuracy": None, "mean_reward": None}
        _save(history, replace(state, **changes), target, trained=_trained(run_dir, history, state))
    elif saved is not None:
        checkpoint.copy_with(saved, target / saved.name, changes)


def _finished(run_dir: Path, state: RunState) -> set[int]:
    """Returns the positions of finished prompts: those of the checkpoint `state`, and those of the
    steps after it.
    """
    done = {*range(state.position), *state.finished}
    for line in read_lines(run_dir / LINES):
        if line["step"] > state.step:
            done |= {group["position"] for group in line["groups"] + line["dropped"]}
    return done


def _trained(run_dir: Path, history: WeightHistory, state: RunState) -> TrainedPrompts:
    """Returns what the models were trained on, up to the checkpoint `state` and after it."""
    trained = TrainedPrompts.of(history.saved or history.policy.config.model.name)
    for later in range(state.step + 1, history.policy.step + 1):
        trained.add(
            (each.prompt, each.ground_truth)
            for each in read_texts(run_dir, later)
            if not each.reason
        )
    return trained


def _save(
    history: WeightHistory, state: RunState, directory: Path, *, trained: TrainedPrompts
) -> None:
    checkpoints = Checkpoints(
        directory,
        Ranks.alone(history.policy.config),
        keep=1,
        static=lambda: checkpoint.tokenizer_files(directory.with_name("model")),
    )
    snapshots: dict[str, Any] = {}
    for model in (history.policy, history.reference, history.critic):
        snapshots |= model.snapshots(checkpoints.gathered)
    checkpoints.save(state, snapshots, {TRAINED_PROMPTS: trained.file()})
    checkpoints.wait()
