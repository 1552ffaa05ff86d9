"""What a fork begins with: the state of the run after a step, and the answers that stay valid."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from common import Json
from common.errors import ConfigError
from common.settings.config import Config, from_mapping
from common.wire.schemas import Completion, Group
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from trainer.audit.history import WeightHistory
from trainer.audit.recorded import config_of
from trainer.cli.commands import argument_names
from trainer.observe.audit import AuditRecord
from trainer.observe.group_files import LINES, read_trained, recorded_steps
from trainer.observe.run_dir import AUDIT, append_line, read_lines
from trainer.policy import checkpoint
from trainer.policy.checkpoint import Checkpoints, RunState
from trainer.policy.identity import identity
from trainer.rollouts.requests import sampling_seed
from trainer.trackers.base import flatten

_CHANGES_ANSWERS = ("sampling.", "model.", "data.", "environment.", "rollout.", "lora.", "seed")
"""Settings with which an engine would have given other answers."""


def prepared(
    run_dir: Path, step: int, output: Path, changes: Mapping[str, Any], *, steps: int | None
) -> "tuple[Config, RecordedAnswers]":
    """Writes the directory of a fork; returns its settings and its engine's recorded answers.
    Raises ConfigError.
    """
    record = AuditRecord(run_dir)
    start = record.start(record.step(step))
    if start.given:
        raise ConfigError(
            f"the caller of the Python API gave the {start.given[0]}, which the run does not keep",
            field="RUN_DIR",
            value=str(run_dir),
            remedy="fork a run that settings describe",
        )
    parent = config_of(start, run_dir, "cpu" if start.setup.device == "cpu" else "auto")
    own = {"trainer.device": start.config["trainer"]["device"], **changes}
    config = _forked(parent, own, output, steps)
    answers = RecordedAnswers()
    if not any(name.startswith(_CHANGES_ANSWERS) for name in changes):
        answers.known = valid_groups(run_dir, parent, step)
    has_other_data = any(name.startswith("data.") for name in changes)
    _begin(run_dir, parent, config, step, record=record, from_start=has_other_data)
    return config, answers


def _forked(parent: Config, changes: Mapping[str, Any], output: Path, steps: int | None) -> Config:
    content = flatten(parent.model_dump(mode="json")) | dict(changes)
    content |= {"trainer.run_dir": str(output), "state_dir": str(output / "state")}
    if steps is not None:
        content["trainer.max_steps"] = steps
    with argument_names({}):
        return from_mapping(content)


def valid_groups(run_dir: Path, config: Config, step: int) -> dict[bytes, tuple[int, Group]]:
    """Returns the groups of later steps that the weights up to `step` sampled alone, with their
    steps, by the request that asked for them. None of episodes, whose calls depend on tools, or
    with truncated sampling.
    """
    found: dict[bytes, tuple[int, Group]] = {}
    if config.environment.name or config.sampling.truncation():
        return found
    for later in sorted(recorded_steps(run_dir)):
        if not step < later <= step + 1 + config.trainer.max_staleness:
            continue
        for item in read_trained(run_dir, later):
            newest = max(
                span[0] for each in item.group.completions for span in each.weight_versions
            )
            if newest > step or item.reused:
                continue
            group = item.group
            prompt = group.prompt_token_ids.tolist()
            seed = sampling_seed(config.seed, group.position)
            found[_request(prompt, seed, len(group.completions))] = later, group
    return found


def _request(prompt: Sequence[int], seed: int | None, count: int) -> bytes:
    return orjson.dumps([seed, count, list(prompt)])


@dataclass
class RecordedAnswers:
    """The engine of a fork: answers with what the run recorded where it was asked the same."""

    known: dict[bytes, tuple[int, Group]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """The steps of the recorded groups that were used, by their positions."""

    def before(self, app: FastAPI) -> httpx.AsyncBaseTransport:
        """Returns the way to the engine's app."""
        return _WayToEngine(self, app)


class _WayToEngine(httpx.AsyncBaseTransport):
    def __init__(self, answers: RecordedAnswers, app: FastAPI) -> None:
        self._answers = answers
        self._inner = httpx.ASGITransport(app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        found = None
        if request.url.path == "/generate":
            body = orjson.loads(await request.aread())
            sampling = body["sampling_params"]
            key = _request(body["input_ids"], sampling.get("sampling_seed"), sampling.get("n", 1))
            found = self._answers.known.pop(key, None)
        if found is None:
            return await self._inner.handle_async_request(request)
        step, group = found
        self._answers.used[group.position] = step
        return httpx.Response(200, json=[_answer(each) for each in group.completions])


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


def _begin(
    run_dir: Path, config: Config, fork: Config, step: int, *, record: AuditRecord, from_start: bool
) -> None:
    """Writes the directory of a fork as it was after `step`: a checkpoint, and the lines of steps.

    `from_start`: its prompts are others, so their stream begins anew.
    """
    output = fork.trainer.run_dir
    assert output is not None
    ranks = Ranks.alone(config)
    with reproducible_numbers(config.reproducible):
        history = WeightHistory(record, run_dir, config, ranks, first=step)
        history.load()
        while history.policy.step < step:
            history.advance()
    output.mkdir(parents=True)
    for name in ("metrics.jsonl", LINES, "samples.jsonl", "evaluations.jsonl", AUDIT):
        for line in read_lines(run_dir / name):
            if line["step"] <= step:
                append_line(output / name, line)
    shutil.copytree(run_dir / "model", output / "model")

    state = RunState(step=0, position=0, run_id=record.step(step).run_id, kl_coef=0.0)
    if history.saved is not None:
        state = checkpoint.load_state(checkpoint.read_state(history.saved), history.saved)
    finished = {
        group["position"]
        for line in read_lines(run_dir / LINES)
        if line["step"] <= step
        for group in (*line.get("groups", ()), *line.get("dropped", ()))
        if group.get("position") is not None
    }
    if from_start:
        finished = set()
    position = next(place for place in range(len(finished) + 1) if place not in finished)
    state = replace(
        state,
        step=step,
        position=position,
        finished=sorted(place for place in finished if place > position),
        kl_coef=history.policy.kl_coef,
        identity=identity(fork),
        accuracy=None,
        mean_reward=None,
    )
    checkpoints = Checkpoints(
        output / "checkpoints",
        ranks,
        config.checkpoint.keep,
        static=lambda: checkpoint.tokenizer_files(output / "model"),
    )
    snapshots = (
        history.policy.snapshots(checkpoints.alone)
        | history.reference.snapshots(checkpoints.alone)
        | history.critic.snapshots(checkpoints.alone)
    )
    checkpoints.save(state, snapshots)
    checkpoints.wait()
