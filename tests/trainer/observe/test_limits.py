"""Every hint and every alarm at its limit: random histories, judged by definitions of a few lines.

The limits are those of the section "A run that does not learn, or is slow" of `operations.md`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import variance
from typing import Any

import numpy as np
import pytest

from common.settings.config import Config
from tests.support.batches.groups import make_group
from trainer.observe.alarms import (
    Agreement,
    alarms,
    other_reference,
    refused_calls,
    same_prompts,
)
from trainer.observe.catalogue import ALARMS
from trainer.observe.duplicate_answers import DuplicateAnswers, copied_answers
from trainer.observe.hints import FIRST, WINDOW, hints
from trainer.policy.update_metrics import Sums
from trainer.timing import STAGES

Line = dict[str, Any]
BATCH = 8
SECONDS = (*STAGES, "waiting")


def number(line: Line, name: str) -> float | None:
    """Returns a number such as `update.entropy`; None without it."""
    found: Any = line
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if found is None else float(found)


def mean(lines: Sequence[Line], name: str) -> float:
    return sum(number(line, name) or 0.0 for line in lines) / max(1, len(lines))


def near(draw: random.Random, limit: float, usual: float) -> float:
    """Returns a usual number, or one at its limit or close to it."""
    return draw.choice([usual, usual, usual, limit, limit * 0.99, limit * 1.01])


def random_history(draw: random.Random) -> list[Line]:
    """Returns a run whose first steps are alike, and its last ones, of two halves."""
    has_verdicts = draw.random() < 0.7
    functions = draw.choice([["a"], ["a", "b"], []])
    usual = {
        **{"reward": 0.5, "copies": 0.1, "truncated": 0.02, "unparsable": 0.05},
        **{"completion_tokens": 300.0, "zero_variance_groups": 1, "staleness": 0.0},
    }
    update = {"kl_reference": 0.01, "ratio": 1.0, "clip_fraction": 0.01, "entropy": 0.5}
    seconds = {**dict.fromkeys(SECONDS, 1), "update": 40, "generation": 40, "evaluation": 90}
    first: Line = {
        **usual,
        "reward": draw.choice([0.5, 0.5, 0.0]),
        "seconds": seconds,
        "update": {**update, "skipped": 0, "trained_tokens": 9},
        "generating": 0.5,
        "rewards": dict.fromkeys(functions, 0.25),
        "accuracy": 0.5 if has_verdicts else None,
    }
    share = draw.choice([0.5, 0.5, 1.0])
    late: Line = {
        "copies": near(draw, 0.75, 0.1),
        "truncated": draw.choice([near(draw, 0.25, 0.02), near(draw, 0.95, 0.02)]),
        "unparsable": near(draw, 0.3, 0.05),
        "completion_tokens": near(draw, 120.0, 300.0),
        "zero_variance_groups": draw.choice([1, 5, 6, 8]),
        "solved_groups": draw.choice([None, 0, 3]),
        "failed_groups": draw.choice([None, 0, 2]),
        "staleness": draw.choice([0.0, 0.5, 0.51, 1.0]),
        "generating": draw.choice([0.5, 0.1, 0.09, 0.49]),
        "lost_episodes": draw.choice([{}, {}, {"timeout": 2, "error": 1}, {"died": 4}]),
    }
    # Whole seconds, whose sums are exact: a stage has this share of a step, or nearly.
    stage, other = draw.sample([name for name in SECONDS if name != "evaluation"], 2)
    part, whole = draw.choice([(3, 20), (1, 5), (3, 10), (7, 20), (1, 2), (4, 5), (1, 20)])
    late["seconds"] = {**dict.fromkeys(SECONDS, 0), "evaluation": 90, other: 100 * (whole - part)}
    late["seconds"][stage] = 100 * part + draw.choice([-1, 0, 1])
    moved: Line = {
        "kl_reference": draw.choice([near(draw, 0.5, 1 / 128), near(draw, 0.05, 1 / 128)]),
        "ratio": draw.choice([1.0, 1.0, 1.21, 0.79, 0.81]),
        "clip_fraction": near(draw, 0.4, 0.01),
        "entropy": near(draw, 0.1, 0.5),
        "trained_tokens": draw.choice([9, 9, 0]),
    }
    if draw.random() < 0.3:
        moved["pass_fill"] = draw.choice([0.69, 0.7, 0.71])
    lines = [dict(first) for _ in range(draw.choice([0, FIRST, FIRST + 3]))]
    reasons = ("generation", "reward", "teacher", "stale", "zero_variance")
    dropped = {name: draw.choice([0, 0, 0, 0, 9, 60]) for name in reasons}
    rises = {name: draw.choice([0.0, 0.0, 0.02, 0.03, -0.06]) for name in ("reward", "accuracy")}
    noise = draw.choice([0.0, 0.01])
    base = draw.choice([0.44, 0.5, 0.5, 0.52, 0.8])
    better = draw.choice([0.0, 0.0, 0.03])
    skips = draw.choice([0, 0, 0, 1, 2])
    grown = draw.choice([None, None, 10 / 128, 10.1 / 128])
    for place in range(draw.choice([WINDOW, WINDOW, WINDOW - 1])):
        half = place >= WINDOW // 2
        line: Line = {
            **first,
            **late,
            "rewards": dict.fromkeys(functions, share),
            "dropped": {name: count * (place + 1) // WINDOW for name, count in dropped.items()},
        }
        line["update"] = {**moved, "skipped": int(place < skips)}
        if grown is not None and place >= WINDOW - 3:
            line["update"]["kl_reference"] = grown
        line["reward"] = first["reward"] + better + half * rises["reward"]
        if has_verdicts:
            line["accuracy"] = base + half * rises["accuracy"] + noise * (-1) ** place
        lines.append(line)
    if "a" in functions:
        lines[-1]["rewards"] = {**lines[-1]["rewards"], "a": draw.choice([0.25, share])}
    for line in lines[-2:]:  # a policy that breaks
        if draw.random() < 0.2:
            line |= {"reward": draw.choice([0.0, 0.05, 0.06]), "truncated": 0.7, "accuracy": 0.0}
            line["accuracy"] = 0.0 if has_verdicts else None
    if draw.random() < 0.05:  # answers without a token, which cannot become shorter
        for line in lines:
            line["completion_tokens"] = 0.0
    return lines


class Judged:
    """The hints of a history by their definitions: whether each is given, and words of it."""

    def __init__(self, lines: list[Line], config: Config) -> None:
        self.lines = lines
        self.config = config
        self.first = lines[:FIRST]
        self.last = lines[-WINDOW:]
        self.trained = [line for line in self.last if number(line, "update.trained_tokens") != 0]
        self.accuracy = None
        if all(number(line, "accuracy") is not None for line in self.last):
            self.accuracy = mean(self.last, "accuracy")

    def rose(self, name: str) -> bool:
        half = len(self.last) // 2
        return mean(self.last[half:], name) - mean(self.last[:half], name) > 0.02

    def dropped(self, reason: str) -> float:
        before = (
            number(self.lines[-WINDOW - 1], f"dropped.{reason}") if len(self.lines) > WINDOW else 0
        )
        now = number(self.last[-1], f"dropped.{reason}") or 0
        return now - (before or 0) if now >= (before or 0) else now

    def share(self, stage: str) -> float:
        def whole(line: Line) -> float:
            names = [name for name in SECONDS if name != "evaluation"]
            return float(sum(line["seconds"][name] for name in names))

        usual = sorted(self.last, key=whole)[:-1]
        of_stage = float(sum(line["seconds"][stage] for line in usual))
        return of_stage / sum(map(whole, usual))

    def equal_share(self) -> float:
        replaced = self.dropped("zero_variance")
        equal = float(sum(line["zero_variance_groups"] for line in self.last))
        return (equal + replaced) / (BATCH * len(self.last) + replaced)

    def constant(self, name: str) -> float | None:
        values = {number(line, name) for line in (*self.first, *self.last)}
        return values.pop() if len(values) == 1 else None

    def policy_breaks(self) -> list[str] | None:
        newest = self.last[-2:]
        first = self.first[:1]
        rate = self.config.optimizer.learning_rate
        if rate > 0.01 and mean(newest, "reward") <= mean(first, "reward"):
            return [f"({rate:g}) is so large"]

        def lost(line: Line) -> float:
            return max(float(line["truncated"]), float(line["unparsable"]))

        result = "reward" if self.accuracy is None else "accuracy"
        began = mean(first, result)
        ended = mean(newest, result)
        now = min(map(lost, newest))
        if now - lost(first[0]) < 0.5 or ended > began - 0.9 * abs(began):
            return None
        shares = (
            f"{lost(first[0]):.0%} were cut or without a final answer in the first step, {now:.0%}"
        )
        return [shares, f"{result} went from {began:.3f} to {ended:.3f}"]

    def same_answers(self) -> list[str] | None:
        share = mean(self.last, "copies")
        if share < 0.75 or (self.accuracy or 0.0) >= 0.8 or self.equal_share() < 0.75:
            return None
        if self.config.sampling.temperature < 0.5:
            return [f"{share:.0%} of the answers", "nearly greedy"]
        entropy = mean(self.trained, "update.entropy")
        certain = f"certain (entropy {entropy:.2g} nats" if self.trained else "certain: start"
        return [f"{share:.0%} of the answers", certain]

    def zero_variance_groups(self) -> list[str] | None:
        share = self.equal_share()
        is_said = self.same_answers() is not None or self.config.algorithm.advantage == "none"
        if share < 0.75 or is_said:
            return None
        solved = sum(number(line, "solved_groups") or 0 for line in self.last)
        failed = sum(number(line, "failed_groups") or 0 for line in self.last)
        constant = self.constant("reward") if share == 1 else None
        words = "apart"
        if constant == 0:
            words = "every answer got the reward 0"
        elif self.accuracy is not None:
            is_easy = solved > failed if solved + failed else self.accuracy >= 0.5
            words = f"are {'right' if is_easy else 'wrong'} (accuracy {self.accuracy:.2f})"
        elif constant is not None:
            words = f"the same reward, {constant:g}"
        return [f"{share:.0%} of the groups", words]

    def dead_reward(self) -> list[str] | None:
        names = list(self.last[-1]["rewards"])
        values = {name: self.constant(f"rewards.{name}") for name in names}
        dead = [f"{name} ({value:g})" for name, value in values.items() if value is not None]
        return [f": {', '.join(dead)}. "] if dead and len(names) > 1 else None

    def reward_hacking(self) -> list[str] | None:
        began = mean(self.first, "accuracy")
        square = 0.0
        for lines in (self.first, self.last):
            known = [line["accuracy"] for line in lines if line["accuracy"] is not None]
            square += variance(known) / len(known) if len(known) > 1 else 0.0
        rewards = mean(self.first, "reward"), mean(self.last, "reward")
        if self.accuracy is None or rewards[1] - rewards[0] < 0.02:
            return None
        if began - self.accuracy < max(0.05, 3 * math.sqrt(square)):
            return None
        words = "rose from {:.3f} to {:.3f}".format(*rewards)
        grown = []
        for name in self.last[-1]["rewards"]:
            scores = mean(self.first, f"rewards.{name}"), mean(self.last, f"rewards.{name}")
            if scores[1] > scores[0] + 0.02:
                grown.append(f"{name} ({scores[0]:.2f} → {scores[1]:.2f})")
        paid = f"pays for{': ' * bool(grown)}{', '.join(grown)}. "
        return [words, f"from {began:.3f} to {self.accuracy:.3f}", paid]

    def format(self) -> list[str] | None:
        share = mean(self.last, "unparsable")
        if share < 0.3 or self.rose("reward"):
            return None
        return [f"in {share:.0%} of", f"(mean {mean(self.last, 'reward'):.3f})"]

    def truncated(self) -> list[str] | None:
        share = mean(self.last, "truncated")
        if self.accuracy is not None:
            is_harmless = self.accuracy >= 0.5
            why = f"accuracy is {self.accuracy:.2f}"
        else:
            is_harmless = self.rose("reward") and share < 0.95
            why = "hardly any ends" if self.rose("reward") else "the reward does not rise"
        if share < 0.25 or is_harmless:
            return None
        return [f"{share:.0%} of the completions", why, *["eos_token_id"] * (share >= 0.95)]

    def short_answers(self) -> list[str] | None:
        began = mean(self.first, "completion_tokens")
        now = mean(self.last, "completion_tokens")
        least = mean(self.first, "accuracy") + 0.02
        learned = self.accuracy is not None and self.accuracy > least
        if now > 0.4 * began or began == 0 or learned:
            return None
        return [f"from {began:.0f} to {now:.0f} tokens"]

    def policy_moves(self) -> list[str] | None:
        newest = self.last[-3:]
        kl = mean(newest, "update.kl_reference")
        before = mean(self.last[:3], "update.kl_reference")
        ratio = mean(newest, "update.ratio")
        clipped = mean(newest, "update.clip_fraction")
        seen = []
        if kl > 0.5:
            seen.append(f"KL to the reference is {kl:.3g} nats")
        elif kl > 0.05 and kl > 10 * before:
            seen.append(f"rose from {before:.3g} to {kl:.3g} nats")
        if abs(ratio - 1) > 0.2:
            seen.append(f"ratio is {ratio:.2f}")
        if clipped > 0.4:
            seen.append(f"{clipped:.0%} of the tokens are clipped")
        return seen or None

    def policy_stands_still(self) -> list[str] | None:
        rate = self.config.optimizer.learning_rate
        return [f"({rate:g}) is so small"] if rate < 2e-8 and not self.rose("reward") else None

    def not_finite(self) -> list[str] | None:
        skipped = int(sum(line["update"]["skipped"] for line in self.last))
        return [f"{skipped} updates were skipped"] if skipped >= 2 else None

    def entropy(self) -> list[str] | None:
        began = mean(self.first, "update.entropy")
        now = mean(self.trained, "update.entropy")
        learns = self.rose("reward")
        why = "the reward does not rise"
        if self.accuracy is not None:
            learns = self.accuracy >= 0.8 or self.rose("accuracy")
            why = f"accuracy stays at {self.accuracy:.2f}"
        if not self.trained or now >= 0.2 * began or learns:
            return None
        return [f"from {began:.3g} to {now:.3g} nats", why]

    def rollout_idle(self) -> list[str] | None:
        allowed = self.config.trainer.max_staleness
        idle = 1 - mean(self.last, "generating")
        update = self.share("update")
        is_old = mean(self.last, "staleness") > allowed - 0.5
        if update < 0.5 or idle <= (0.5 if allowed else 0.9) or not is_old:
            return None
        return [f"idle for {idle:.0%} of the time", f"takes {update:.0%}"]

    def half_full_passes(self) -> list[str] | None:
        known = [line for line in self.trained if "pass_fill" in line["update"]]
        fill = mean(known, "update.pass_fill")
        is_set = self.config.trainer.micro_batch_tokens != "auto"
        return [f"are {fill:.0%} full"] if known and is_set and fill < 0.7 else None

    def lost_episodes(self) -> list[str] | None:
        kinds = ("timeout", "died", "error")
        lost = {
            kind: sum(number(line, f"lost_episodes.{kind}") or 0 for line in self.last)
            for kind in kinds
        }
        count = sum(lost.values())
        share = count / (len(self.last) * BATCH * self.config.sampling.group_size + count)
        most = max(kinds, key=lambda kind: lost[kind])
        return [f"{count:.0f} episodes ({share:.0%})", f"mostly {most}"] if share >= 0.1 else None

    def of_stage(self, stage: str, limit: float) -> list[str] | None:
        share = self.share(stage)
        return [f"{share:.0%} of the time"] if share >= limit else None

    def of_drops(self, reason: str) -> list[str] | None:
        count = self.dropped(reason)
        share = count / (len(self.last) * BATCH + count)
        return (
            [f"{count:.0f} groups ({share:.0%}) were dropped ({reason})"] if share >= 0.1 else None
        )

    def all(self) -> dict[str, list[str]]:
        """Returns words of each hint that is given."""
        stale = self.config.trainer.max_staleness > 0
        stages = {
            "generation_bound": ("generation", 0.5 if stale else 0.8),
            "publish_bound": ("publish", 0.35),
            "stragglers": ("stragglers", 0.15),
            "reward_bound": ("reward", 0.3),
            "replay_bound": ("replay", 0.2),
            "nothing_active": ("waiting", 0.3),
        }
        own: list[Callable[[], list[str] | None]] = [
            *(self.zero_variance_groups, self.same_answers, self.dead_reward, self.reward_hacking),
            *(self.format, self.truncated, self.short_answers, self.policy_moves, self.not_finite),
            *(self.policy_stands_still, self.entropy, self.rollout_idle, self.half_full_passes),
            self.lost_episodes,
        ]
        found = {"policy_breaks": self.policy_breaks()}
        if len(self.lines) >= WINDOW:
            found |= {each.__name__: each() for each in own}
            found |= {name: self.of_stage(*of) for name, of in stages.items()}
            for reason in ("generation", "reward", "teacher", "stale"):
                found[f"dropped_{reason}"] = self.of_drops(reason)
        return {name: words for name, words in found.items() if words is not None}


def test_hints_are_given_from_their_limits_on() -> None:
    given: dict[str, int] = {}
    for seed in range(350):
        draw = random.Random(seed)
        lines = random_history(draw)
        config = Config()
        config.trainer.batch_size = BATCH
        config.sampling.group_size = draw.choice([1, 4])
        config.trainer.max_staleness = draw.choice([0, 1])
        config.optimizer.learning_rate = draw.choice([1e-6, 1e-6, 1e-2, 1.1e-2, 2e-8, 1.9e-8])
        config.sampling.temperature = draw.choice([1.0, 0.5, 0.49])
        config.trainer.micro_batch_tokens = draw.choice(["auto", 16_384])
        config.algorithm.advantage = draw.choice(["group", "group", "none"])
        expected = Judged(lines, config).all()
        found = hints(lines, config)
        assert found.keys() == expected.keys(), seed
        for name, words in expected.items():
            given[name] = given.get(name, 0) + 1
            assert all(each in found[name] for each in words), (seed, words, found[name])
    assert len(given) >= 24, "every hint was given, but for one that has its own test"


def test_accuracy_is_lost_when_it_falls_by_more_than_its_noise() -> None:
    """Three standard errors of the difference between the first steps and the last ones."""
    given = 0
    for seed in range(120):
        draw = random.Random(seed)
        noise = draw.choice([0.0, 0.05, 0.1, 0.15])
        fall = draw.uniform(0.03, 0.2)
        rise = draw.choice([0.01, 0.02, 0.05])
        lines = random_history(draw)
        for place, line in enumerate(lines):
            is_late = place >= len(lines) - WINDOW
            line["reward"] = 0.3 + rise * is_late
            line["accuracy"] = 0.6 - fall * is_late + draw.uniform(-noise, noise)
            line["rewards"] = {"a": 0.25 + draw.choice([0.0, 0.5]) * is_late}
        judged = Judged(lines, Config())
        words = judged.all().get("reward_hacking")
        found = hints(lines, Config()).get("reward_hacking")
        assert (found is None) == (words is None), seed
        given += words is not None
        assert all(each in (found or "") for each in words or ())
    assert given > 10, "it is given and not given"


@pytest.mark.parametrize("known", [0, 1, WINDOW - 1, WINDOW])
def test_engines_are_idle_only_where_every_step_says_what_they_did(known: int) -> None:
    """The first steps may be of a version that did not measure it."""
    seconds = {**dict.fromkeys(SECONDS, 0), "update": 100}
    lines: list[Line] = [
        {"step": step, "reward": float(step), "staleness": 0.0, "seconds": seconds}
        for step in range(WINDOW + 3)
    ]
    for line in lines[len(lines) - known :]:
        line["generating"] = 0.01
    assert ("rollout_idle" in hints(lines, Config())) == (known == WINDOW)


@pytest.mark.parametrize("count", [9, 10])
@pytest.mark.parametrize("reason", ["generation", "reward", "teacher", "stale"])
def test_a_tenth_of_groups_or_episodes_is_too_much(reason: str, count: int) -> None:
    """The share counts the 90 that were trained on and those that were lost."""
    config = Config()
    config.trainer.batch_size = 9
    config.sampling.group_size = 1
    line: Line = {"reward": 0.0, "dropped": {}, "lost_episodes": {}}
    lines = [{**line, "step": step} for step in range(WINDOW + 1)]
    lines[-1] = {**lines[-1], "dropped": {reason: count}, "lost_episodes": {"died": count}}
    found = hints(lines, config)
    assert (f"dropped_{reason}" in found) == ("lost_episodes" in found) == (count == 10)


UPDATE = replace(
    Sums().metrics([0.1], 1e-6, 0.0, skipped=0, stopped=False),
    delta_logprob_current=0.01,
    kl_rollout=5e-4,
    effective_sample_size=0.99,
    trained_tokens=9,
    entropy=0.5,
)


@pytest.mark.parametrize("seed", range(100))
def test_alarms_are_raised_beyond_their_limits(seed: int) -> None:
    draw = random.Random(seed)
    config = Config()
    config.sampling.top_p = draw.choice([1.0, 1.0, 0.9])
    staleness = draw.choice([0.0, 0.0, 0.5])
    dropout = draw.choice([[], [], ["lora.dropout 0.1"]])
    before = Agreement(draw.choice([0, 3]), draw.choice([0.0, 0.01, 0.2]))
    measured = replace(
        UPDATE,
        delta_logprob_current=draw.choice([0.01, 0.02, 0.021, 0.05, 0.9999, 1.0, 1.2]),
        kl_rollout=draw.choice([1e-3, 1.1e-3, 1e-2, 1.1e-2]),
        effective_sample_size=draw.choice([0.9, 0.5, 0.49]),
        trained_tokens=draw.choice([0, 9, 9, 9]),
        likelihood_gap=draw.choice([0.0, 0.075, 0.08, 0.07, -1.0]),
        likelihood_error=draw.choice([0.0, 0.01, 0.009]),
        entropy=draw.choice([0.5, 0.0]),
    )
    delta = measured.delta_logprob_current
    measured = replace(measured, logprob_gap=delta * draw.choice([0.4, 0.5, 0.51, -0.9]))
    found = alarms(measured, staleness, config, dropout, before)

    limits = {"kl_rollout": 1e-2 if staleness else 1e-3, "delta_logprob": 0.02}
    values = {"kl_rollout": measured.kl_rollout, "delta_logprob": delta}
    expected = {name for name, limit in limits.items() if values[name] > limit}
    if measured.effective_sample_size < 0.5:
        expected.add("effective_sample_size")
    gap = measured.likelihood_gap
    is_sure = gap >= 0.15 * measured.entropy and gap >= 8 * measured.likelihood_error
    if gap > 0 and is_sure and measured.trained_tokens and config.sampling.top_p == 1.0:
        expected.add("likelihood")
    assert found.keys() == expected

    if dropout:
        mismatch = "dropout (lora.dropout 0.1)"
    elif before.step and delta >= 5 * before.delta:
        mismatch = f"until step 3 both agreed ({before.delta:.2g})"
    elif before.step:
        mismatch = f"it grew from {before.delta:.2g} in step 3"
    elif delta < 1 and measured.logprob_gap > 0.5 * delta:
        mismatch = f"are higher, by {measured.logprob_gap:.2g} on average"
    else:
        mismatch = "another precision or a quantised engine"
    cause = "0.5 weight versions old" if staleness else mismatch
    for name, text in found.items():
        if name == "delta_logprob":
            assert f"is {delta:.3g} on the same weights" in text
            assert mismatch in text
        elif name != "likelihood":
            assert cause in text
    if "kl_rollout" in found:
        assert f"is {measured.kl_rollout:.3g} nats" in found["kl_rollout"]
        assert f"above {limits['kl_rollout']:g}" in found["kl_rollout"]
    if "effective_sample_size" in found:
        assert "is 0.49 of the tokens (alarm below 0.5)" in found["effective_sample_size"]
    if "likelihood" in found:
        said = f"by {gap:.2g} nats per token (entropy is {measured.entropy:.2g})"
        assert said in found["likelihood"]


@pytest.mark.parametrize("correction", ["none", "truncate"])
@pytest.mark.parametrize("reuse", [0.0, 0.5])
@pytest.mark.parametrize("allowed", [0, 2])
def test_old_experience_names_each_setting_that_makes_it_old(
    correction: Any, reuse: float, allowed: int
) -> None:
    config = Config()
    config.algorithm.rollout_correction = correction
    config.replay.reuse_ratio = reuse
    config.replay.max_reuse_staleness = 7
    config.trainer.max_staleness = allowed
    text = alarms(replace(UPDATE, kl_rollout=1.0), 1.25, config)["kl_rollout"]
    names = ["replay.max_reuse_staleness (7)"] * (reuse > 0)
    names += [f"trainer.max_staleness ({allowed})"] * (allowed > 0)
    assert f"; lower {' or '.join([*names, 'optimizer.learning_rate'])}" in text
    assert "is 1.2 weight versions old" in text
    assert ("rollout_correction truncate" in text) == (correction == "none")


def test_other_alarms_are_raised_from_their_limits_on() -> None:
    config = Config()
    config.model.reference = "another"
    limit = ALARMS["reference"].limit
    assert limit == 0.05
    assert other_reference(limit, config) == {}
    assert "is 0.051 nats" in other_reference(0.051, config)["reference"]

    rng = np.random.default_rng(0)
    groups = [make_group(rng, [0.0], position=n) for n in range(3)]
    for count, text in enumerate(["a  b", "a b\n", "c"], 1):
        groups[count - 1].prompt = text
        groups[count - 1].prompt_token_ids = groups[0].prompt_token_ids
        found = same_prompts(groups[:count], config)
        assert bool(found) == (count == 3), "white space may be trimmed"
    assert "2 different problems" in found["same_prompts"]

    for surprise in (19.9, 20.0):
        copies = DuplicateAnswers(share=0.25, surprise=surprise, example=3e-9)
        found = copied_answers(copies, config)
        assert bool(found) == (surprise == 20.0)
    assert found["copied_answers"].startswith("25% of the answers")
    assert "probability of 3e-09" in found["copied_answers"]

    assert refused_calls(0, "why", [0.0], config) == {}
    text = refused_calls(1, "why", [0.0, 0.0], config)["refused_calls"]
    assert text == "all rewards are 0, and 1 calls of the model were refused: why"
    text = refused_calls(3, "why", [0.0, 0.5], config)["refused_calls"]
    assert text == "3 calls of the model were refused: why"


def test_every_alarm_may_name_settings_and_what_to_switch_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which the rows of the catalogue do as they need it."""
    for name, row in ALARMS.items():
        named = replace(
            row,
            remedy=row.remedy + " lower {config.optimizer.learning_rate:g}",
            remedies_unless_set={"lora.rank": " or use LoRA", "lora.alpha": " or less"},
        )
        monkeypatch.setitem(ALARMS, name, named)
    config = Config()
    config.model.reference = "another"
    config.optimizer.learning_rate = 0.125
    config.lora.alpha = 3
    wrong = replace(
        UPDATE,
        delta_logprob_current=9.0,
        kl_rollout=9.0,
        effective_sample_size=0.0,
        likelihood_gap=9.0,
    )
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [0.0], position=n) for n in range(3)]
    for number, group in enumerate(groups):
        group.prompt = f"problem {number}"
        group.prompt_token_ids = groups[0].prompt_token_ids
    copies = DuplicateAnswers(share=0.5, surprise=99.0, example=0.0)
    found = {
        **alarms(wrong, 0.0, config),
        **other_reference(9.0, config),
        **same_prompts(groups, config),
        **copied_answers(copies, config),
        **refused_calls(1, "why", [0.0], config),
    }
    assert found.keys() == ALARMS.keys()
    for text in found.values():
        assert text.endswith(" lower 0.125 or use LoRA")
