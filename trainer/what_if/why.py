"""Says why a run collapsed or jumped: the first step, the likely cause, and the groups and tokens
that carry it.
"""

import itertools
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.console import Console

from common import Json
from common.errors import ConfigError, ServiceError, did_you_mean
from common.process.cli import CommandParser, positive, run
from trainer.audit.waits import waits_told
from trainer.cli.commands import run_parser
from trainer.cli.compare import plain_table
from trainer.dashboard.tokens import TokenTexts
from trainer.observe.group_files import GroupSummary
from trainer.observe.run_dir import AUDIT, WHY, check_run, storing_run
from trainer.what_if.causes import causes
from trainer.what_if.run_facts import Jump, RunFacts

_EPILOG = """\
examples:
  rlhf why runs/demo-seed0
  rlhf why runs/demo-seed0 --metric completion_tokens
  rlhf why runs/demo-seed0 --step 12            # the groups that made this step's update

Causes are looked for in the recorded files. With trainer.audit true the gradient of the step is
recomputed, group by group; otherwise a group's share is that of its |advantage| times its tokens.
The answer is also written to RUN_DIR/why.json, which the dashboard shows.
"""
_WATCHED = (
    "reward",
    "accuracy",
    "update.grad_norm",
    "update.entropy",
    "completion_tokens",
    "truncated",
    "unparsable",
    "update.kl_rollout",
    "copies",
)
_LEAST = 4.0
"""Size of a jump that is more than chance."""
_GROUPS = 5
_OF_THE_STEP = ("update.grad_norm", "update.kl_rollout")
"""Numbers that a step's own update has; the others are of answers that the update before it
changed."""


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [--metric NAME] [--step STEP]"
    made = run_parser("rlhf why", __doc__, usage, _EPILOG)
    made.add_argument("--metric", metavar="NAME", help="the number that jumps (default: any)")
    made.add_argument(
        "--step", type=positive, metavar="STEP", help="the step that is looked at (default: found)"
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Prints the answer. Raises ConfigError for a directory without a step, or an unknown number
    or step.
    """
    arguments = parser().parse_args(argv)
    run_dir: Path = arguments.run_dir
    check_run(run_dir)
    facts = RunFacts.read(run_dir)
    answer = explain(facts, arguments.metric, arguments.step)
    _print(answer, Console(highlight=False, markup=False))
    path = run_dir / WHY
    with storing_run(path):
        path.write_text(json.dumps(answer, ensure_ascii=False, indent=1), encoding="utf-8")


def explain(facts: RunFacts, metric: str | None = None, step: int | None = None) -> Json:
    """Returns the answer: `jump` (in words, None without one), `causes`, `changes` of settings, and
    `step` with its `groups` and what they have in common (`traits`). Raises ConfigError.
    """
    if metric and not facts.series(metric):
        raise ConfigError(
            "the run did not record this number",
            field="--metric",
            value=metric,
            remedy=did_you_mean(metric, facts.columns.names) or None,
        )
    if step is not None and step not in facts.groups:
        raise ConfigError(
            "the run did not record the groups of this step",
            field="--step",
            value=step,
            remedy=f"name one from {min(facts.groups, default=0)} to "
            f"{max(facts.groups, default=0)}",
        )
    found = list(causes(facts))
    jump = _jump(facts, metric)
    if step is None and found and (jump is None or found[0].first <= jump.step):
        step = found[0].first
    elif step is None and jump is not None:
        step = jump.step if jump.metric in _OF_THE_STEP else jump.step - 1
    carriers: Json = {"groups": [], "how": ""}
    if step is not None and facts.groups.get(step):
        carriers = _carriers(facts, step)
    return {
        "jump": jump and jump.text,
        "causes": [asdict(cause) for cause in found],
        "changes": [f"step {step}: {change}" for step, change in facts.changes()],
        "step": step,
        **carriers,
    }


def _jump(facts: RunFacts, metric: str | None) -> Jump | None:
    names = _WATCHED if metric is None else (metric,)
    # A number that was asked for may jump by chance.
    least = 0.0 if metric else _LEAST
    jumps = [jump for jump in map(facts.jump, names) if jump is not None and jump.size >= least]
    return max(jumps, key=lambda jump: jump.size, default=None)


def _carriers(facts: RunFacts, step: int) -> Json:
    """Returns the groups that carry most of a step's update, and what they have in common."""
    groups = {group.id: group for group in facts.groups[step]}
    pulls = {
        name: (group.advantage or 0.0) * sum(group.tokens or ()) for name, group in groups.items()
    }
    total = sum(pulls.values()) or 1.0
    rows: list[Json] = [{"id": name, "share": pull / total} for name, pull in pulls.items()]
    how = "share of |advantage| × tokens"
    if (facts.directory / AUDIT).is_file():
        try:
            with waits_told():
                from trainer.what_if.gradients import step_gradient  # torch: slow to import

                norm, parts = step_gradient(facts.directory, step)
            how = f"share of the recomputed gradient, whose norm is {norm:.3g}"
            rows = list(map(asdict, parts))
        except ServiceError as error:
            how += f"; the gradient cannot be recomputed: {error.message}"
    rows.sort(key=lambda row: -row["share"])
    # The fewest groups that make half of the update.
    shares = list(itertools.accumulate(row["share"] for row in rows))
    count = 1 + sum(share < 0.5 for share in shares)
    ordered = [groups[row["id"]] for row in rows]
    traits = _traits(ordered[:count], ordered[count:])
    if shares[-1] < 0.5:
        traits = [f"the terms of KL and entropy make {1 - shares[-1]:.0%} of the update"]
    # A group of equal rewards carries nothing.
    shown = [row for row in rows[:_GROUPS] if row["share"] != 0.0]
    for row in shown:
        group = groups[row["id"]]
        row["tokens"] = _texts(facts.directory, row.pop("pushing", []))
        row |= {"step": step, "prompt": (group.prompt or "")[:200]}
        row |= {"reward": group.reward, "rewards": group.rewards}
    return {
        "groups": shown,
        "how": how,
        "traits": traits,
    }


def _traits(half: Sequence[GroupSummary], others: Sequence[GroupSummary]) -> list[str]:
    """Returns what the groups that make half of an update have in common and the others lack, as
    far as it is no chance.
    """
    said = [f"{len(half)} of {len(half) + len(others)} groups make half of the update"]
    problems = {group.prompt_id for group in half}
    if len(half) > 1 and len(problems) == 1:
        said.append(f"they are of one problem, {problems.pop()}")
    features = [[_features(group) for group in part] for part in (half, others)]
    sizes = len(half), len(others)
    if min(sizes) < 1 or sum(sizes) < 3:  # nothing scatters
        return said
    for name in sorted(set().union(*features[0], *features[1])):
        own = [each.get(name, 0.0) for each in features[0]]
        rest = [each.get(name, 0.0) for each in features[1]]
        apart = fmean(own) - fmean(rest)
        # Of the difference of two means, if both parts scatter alike.
        scatter = sum((value - fmean(part)) ** 2 for part in (own, rest) for value in part)
        error = math.sqrt(scatter / (sum(sizes) - 2) * sum(1 / size for size in sizes))
        if abs(apart) > max(3 * error, 0.5 * max(abs(fmean(own)), abs(fmean(rest)))):
            said.append(f"{name}: {fmean(own):.3g}, of the others {fmean(rest):.3g}")
    return said


def _features(group: GroupSummary) -> dict[str, float]:
    """Returns the numbers of a group by what it may have in common with others."""
    prompt = group.prompt or " "
    return {
        "tokens an answer": fmean(group.tokens or [0]),
        "characters of the problem": len(prompt),
        "share of other scripts than Latin": fmean(sign > "\u024f" for sign in prompt),
        "oldest weights": min(group.versions or (0,)),
        **{f"share {mark}": 1.0 for mark in group.marks},
    }


def _texts(run_dir: Path, pushing: Sequence[Sequence[int]]) -> list[str]:
    """Returns the last token of each answer after what was before it; none without a tokenizer."""
    with suppress(ServiceError):
        texts = map(TokenTexts.of_run(run_dir).texts, pushing)
        return [f"{''.join(before)[-30:]}▸{last}" for *before, last in texts]
    return []


def _print(answer: Json, console: Console) -> None:
    console.print(answer["jump"] or "no number jumps by more than chance")
    for place, cause in enumerate(answer["causes"]):
        title = "also" if place else "likely cause"
        console.print(f"{title}: {cause['name']}", style="bold")
        console.print("  {what}\n  remedy: {remedy}".format(**cause))
        if cause["groups"]:
            places = ", ".join(f"step {step} {name}" for step, name in cause["groups"])
            console.print(f"  groups: {places}")
    if not answer["causes"]:
        console.print("none of the known causes has left a trace")
    for change in answer["changes"]:
        console.print(f"settings changed at {change}")
    if not answer["groups"]:
        return
    title = f"step {answer['step']}: the groups that carry its update; {answer['how']}"
    table = plain_table(title, ["problem", "share", "norm", "without it", "rewards"])
    for row in answer["groups"]:
        # Without a recomputed gradient the norms are not known.
        norms = [f"{row[name]:.3g}" if name in row else "–" for name in ("norm", "without")]
        reward = "–" if row["reward"] is None else f"{row['reward']:.2f}"
        table.add_row(row["prompt"][:60], f"{row['share']:.0%}", *norms, reward)
    console.print(table)
    for trait in answer["traits"]:
        console.print(trait)
    for text in answer["groups"][0]["tokens"]:
        console.print(f"  pushes most: …{text!r}")


if __name__ == "__main__":
    run(main, "")
