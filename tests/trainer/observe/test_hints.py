"""Hints: each comes from a hand-made history, with its numbers and settings; a healthy run gets
none."""

import re
from typing import Any

import pytest

from common.settings.config import Config
from tests.support.paths import ROOT
from trainer.observe.catalogue import HINTS
from trainer.observe.hints import FIRST, WINDOW, hints, remember
from trainer.observe.run_dir import read_lines

HEALTHY: dict[str, Any] = {
    "reward": 0.5,
    "accuracy": 0.5,
    "zero_variance_groups": 1,
    "solved_groups": 1,
    "failed_groups": 0,
    "staleness": 0.0,
    "truncated": 0.02,
    "unparsable": 0.05,
    "copies": 0.1,
    "completion_tokens": 300.0,
    "dropped": {},
    "generating": 0.5,
    "seconds": {
        **{"update": 4.0, "publish": 1.0, "evaluation": 100.0, "generation": 4.0, "reward": 0.5},
        **{"replay": 0.3, "waiting": 0.2},
    },
    "update": {
        "kl_reference": 0.01,
        "ratio": 1.0,
        "clip_fraction": 0.01,
        "entropy": 0.5,
        "skipped": 0,
    },
}
SECTIONS = "|".join(
    name for name in Config.model_fields if name not in ("seed", "state_dir", "max_body_mb")
)


def history(*changes: dict[str, Any], healthy: int = FIRST) -> list[dict[str, Any]]:
    """Returns healthy steps, then a window of changed ones: `changes` in turn, the last one
    repeated."""
    lines: list[dict[str, Any]] = [HEALTHY] * healthy
    for i in range(WINDOW):
        change = dict(changes[min(i, len(changes) - 1)])
        for section in ("seconds", "update"):
            if section in change:
                change[section] = HEALTHY[section] | change[section]
        lines.append(HEALTHY | change)
    return lines


def config(**settings: Any) -> Config:
    """Makes a configuration; names have `__` instead of the dot."""
    sections: dict[str, dict[str, Any]] = {"trainer": {"batch_size": 10}}
    for name, value in settings.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    return Config(**sections)


def test_a_learning_rate_that_changes_nothing_is_named() -> None:
    text = only("policy_stands_still", history({}), optimizer__learning_rate=5e-9)
    assert "optimizer.learning_rate (5e-09)" in text
    assert not hints(history({}), config(optimizer__learning_rate=1e-7))
    learning = history(*[{"reward": 0.5 + step / 50} for step in range(WINDOW)])
    assert not hints(learning, config(optimizer__learning_rate=5e-9))


def test_a_policy_that_breaks_in_one_update_is_named_at_once() -> None:
    """The numbers of the built-in task at a hundred times its learning rate, 0.05, without KL."""
    whole = HEALTHY | {"reward": 0.125, "accuracy": 0.125, "truncated": 0.0, "unparsable": 0.0}
    no_token = {"entropy": 0.0, "trained_tokens": 0}
    broken = whole | {"reward": 0.0, "accuracy": 0.0, "update": no_token}
    lines = [whole, *(broken | {"truncated": share} for share in (1.0, 0.91, 0.91))]
    text = "the answers fell apart: 0% were cut or without a final answer in the first step, 91%"
    rate = {"optimizer__learning_rate": 1e-3}
    assert hints(lines[:2], config(**rate)) == {}, "one odd batch"
    assert text in only("policy_breaks", lines[:3], **rate)
    assert "optimizer.learning_rate (0.001" in only("policy_breaks", lines, **rate)
    assert "(5) is so large" in only("policy_breaks", lines[:1], optimizer__learning_rate=5.0)

    learns = [whole, whole | {"reward": 0.2}]
    assert hints(learns, config(optimizer__learning_rate=0.03)) == {}, "a tiny model"

    gone = broken | {"truncated": 0.1, "unparsable": 0.7}
    found = hints([*lines, *[gone] * WINDOW], config(**rate))
    assert "policy_breaks" in found
    assert "entropy" not in found, "an update on no token measures no entropy"
    better = whole | {"truncated": 0.9, "accuracy": 0.3}
    assert hints([whole, better, better], config(**rate)) == {}


def test_without_verdicts_hints_look_at_the_reward() -> None:
    unrated = {"accuracy": None, "solved_groups": None, "failed_groups": None}
    whole = HEALTHY | unrated | {"reward": 0.125, "truncated": 0.0, "unparsable": 0.0}
    broken = whole | {"reward": 0.0, "truncated": 1.0}
    rate = {"optimizer__learning_rate": 1e-3}
    assert "policy_breaks" in hints([whole, broken, broken], config(**rate))
    better = broken | {"reward": 0.2}
    assert "policy_breaks" not in hints([whole, better, better], config(**rate))
    text = only("zero_variance_groups", history(unrated | {"zero_variance_groups": 9}))
    assert "the reward does not tell answers to one prompt apart" in text.lower()
    assert "accuracy" not in text
    text = only("truncated", history(unrated | {"truncated": 0.4}), sampling__max_new_tokens=400)
    assert "(400), and the reward does not rise" in text
    assert "the reward does not rise" in only(
        "entropy", history(unrated | {"update": {"entropy": 0.04}})
    )
    rising = [
        unrated | {"reward": 0.05 * i, "truncated": 0.4, "update": {"entropy": 0.04}}
        for i in range(WINDOW)
    ]
    assert hints(history(*rising), config()) == {}


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize("share", [0.4, 0.99])
def test_cut_answers_without_verdicts_are_harmless_while_the_reward_rises_and_some_end(
    rises: bool, share: float
) -> None:
    unrated = {"accuracy": None, "solved_groups": None, "failed_groups": None, "truncated": share}
    found = hints(history(*[unrated | {"reward": 0.05 * i * rises} for i in range(10)]), config())
    assert ("truncated" in found) == (not rises or share > 0.9)
    if "truncated" in found:
        assert ("the reward does not rise" in found["truncated"]) == (not rises)


def test_copies_are_no_fault_while_the_groups_still_teach() -> None:
    """As in a task with short answers."""
    copies = {"copies": 0.8, "zero_variance_groups": 5, "accuracy": 0.6}
    assert hints(history(copies), config()) == {}


def only(name: str, lines: list[dict[str, Any]], **settings: Any) -> str:
    """Returns the text of the only hint."""
    found = hints(lines, config(**settings))
    assert set(found) == {name}
    return found[name]


def settings_in(text: str) -> set[str]:
    return set(re.findall(rf"\b(?:{SECTIONS})\.[a-z_]+", text))


KL_RISES = [
    {"update": {"kl_reference": kl}}
    for kl in (0.004, 0.004, 0.005, 0.01, 0.02, 0.03, 0.05, 0.06, 0.08, 0.09)
]
ASYNC = {"trainer__max_staleness": 1}
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = [
    (
        "zero_variance_groups",
        [{"zero_variance_groups": 8, "solved_groups": 8, "accuracy": 0.93}],
        {},
        (
            "80% of the groups",
            "right (accuracy 0.93)",
            "too easy",
            "data.curriculum",
            "algorithm.dynamic_sampling",
        ),
    ),
    (
        "zero_variance_groups",
        [{"zero_variance_groups": 9, "solved_groups": 0, "failed_groups": 9, "accuracy": 0.02}],
        {},
        (
            "90% of the groups",
            "wrong (accuracy 0.02)",
            "too hard",
            "model.name",
            "sampling.group_size",
        ),
    ),
    (
        "same_answers",
        [{"zero_variance_groups": 10, "failed_groups": 10, "accuracy": 0.1, "copies": 0.97}],
        {"sampling__temperature": 0.01},
        ("97% of the answers are the same", "sampling.temperature (0.01) is nearly greedy"),
    ),
    (
        "same_answers",
        [{"zero_variance_groups": 10, "accuracy": 0.1, "copies": 0.8, "update": {"entropy": 0.3}}],
        {},
        ("80% of the answers are the same", "certain (entropy 0.3 nats", "algorithm.entropy_coef"),
    ),
    (
        "reward_hacking",
        [{"reward": 0.8, "accuracy": 0.3, "rewards": {"brief": -0.01, "style": 0.9}}],
        {},
        ("rose from 0.500 to 0.800", "accuracy fell from 0.500 to 0.300", ": style (0.00 → 0.90)"),
    ),
    (
        "short_answers",
        [{"completion_tokens": 60.0, "accuracy": 0.5}],
        {},
        ("from 300 to 60 tokens", "sampling.max_new_tokens", "algorithm.aggregation"),
    ),
    (
        "truncated",
        [{"truncated": 0.99, "accuracy": 0.2}],
        {},
        ("99% of the completions are cut", "hardly any answer ends by itself", "eos_token_id"),
    ),
    (
        "format",
        [{"unparsable": 0.6, "reward": 0.1, "accuracy": 0.55}],
        {},
        (
            "in 60% of the completions",
            "does not rise (mean 0.100)",
            "sampling.system_prompt",
            "format in reward.functions",
        ),
    ),
    (
        "truncated",
        [{"truncated": 0.4, "accuracy": 0.2}],
        {"sampling__max_new_tokens": 300},
        (
            "40% of the completions are cut at sampling.max_new_tokens (300)",
            "accuracy is 0.20",
            "algorithm.overlong_buffer",
        ),
    ),
    (
        "policy_moves",
        KL_RISES,
        {"algorithm__kl_coef": 0.01},
        (
            "rose from 0.00433 to 0.0767 nats",
            "optimizer.learning_rate (1e-06)",
            "algorithm.kl_coef 0.01",
        ),
    ),
    (
        "policy_moves",
        [{"update": {"kl_reference": 0.8}}],
        {},
        ("KL to the reference is 0.8 nats", "optimizer.learning_rate"),
    ),
    (
        "policy_moves",
        [{"update": {"ratio": 1.5, "clip_fraction": 0.45}}],
        {"algorithm__update_epochs": 4, **ASYNC},
        (
            "ratio is 1.50",
            "45% of the tokens are clipped",
            "algorithm.early_stop_kl",
            "trainer.max_staleness 1",
        ),
    ),
    (
        "not_finite",
        [{"update": {"skipped": 1}}],
        {},
        ("10 updates were skipped", "optimizer.max_grad_norm"),
    ),
    (
        "entropy",
        [{"update": {"entropy": 0.04}}],
        {},
        (
            "from 0.5 to 0.04 nats",
            "accuracy stays at 0.50",
            "algorithm.entropy_coef",
            "sampling.temperature",
        ),
    ),
    (
        "generation_bound",
        [{"seconds": {"generation": 40.0}}],
        {},
        ("87% of the time", "rollout.max_running_requests", "trainer.max_staleness 1 lets"),
    ),
    (
        "generation_bound",
        [{"seconds": {"generation": 7.0}}],
        ASYNC,
        ("54% of the time", "sampling.max_new_tokens"),
    ),
    (
        "rollout_idle",
        [{"seconds": {"update": 40.0}, "generating": 0.05}],
        {},
        (
            "idle for 95% of the time",
            "takes 87%",
            "trainer.max_staleness 1",
            "trainer.micro_batch_tokens",
        ),
    ),
    (
        "rollout_idle",
        [{"seconds": {"update": 40.0}, "generating": 0.3, "staleness": 1.0}],
        ASYNC,
        ("idle for 70% of the time", "as old as trainer.max_staleness (1)"),
    ),
    (
        "half_full_passes",
        [{"update": {"pass_fill": 0.54}}],
        {"sampling__max_new_tokens": 8192, "trainer__micro_batch_tokens": 16_384},
        ("54% full", "2 of the longest", "trainer.micro_batch_tokens (16384)", "Set it to 16896"),
    ),
    (
        "reward_bound",
        [{"seconds": {"reward": 8.0}}],
        {},
        ("46% of the time", "reward.workers", "timeout_s in reward.functions"),
    ),
    (
        "replay_bound",
        [{"seconds": {"replay": 4.0}}],
        {},
        ("29% of the time", "state_dir", "replay.reuse_ratio"),
    ),
    (
        "publish_bound",
        [{"seconds": {"publish": 8.0}}],
        {},
        ("47% of the time", "trainer.weight_sync", "lora.rank"),
    ),
    (
        "nothing_active",
        [{"seconds": {"waiting": 8.0}}],
        {},
        ("45% of the time", "data-server", "OMP_NUM_THREADS"),
    ),
    (
        "dropped_generation",
        [{"dropped": {"generation": 7 * i}} for i in range(1, WINDOW + 1)],
        {},
        ("70 groups (41%) were dropped (generation)", "sampling.max_new_tokens"),
    ),
    (
        "dropped_reward",
        [{"dropped": {"reward": 20}}],
        {},
        ("20 groups (17%)", "the log says", "timeout_s of a function in reward.functions"),
    ),
    (
        "stragglers",
        [{"seconds": {"stragglers": 2.0}}],
        ASYNC,
        ("17% of the time", "trainer.max_staleness", "when_stale train"),
    ),
    (
        "lost_episodes",
        [{"lost_episodes": {"timeout": 8, "died": 2}}],
        {},
        ("100 episodes (11%) were lost, mostly timeout", "environment.deadline_s"),
    ),
    (
        "dropped_stale",
        [{"dropped": {"stale": 20}}],
        ASYNC,
        ("20 groups (17%)", "trainer.max_staleness"),
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "settings", "phrases"), CASES, ids=[case[0] for case in CASES]
)
def test_a_problem_is_reported_with_its_numbers_and_settings(
    name: str, changes: list[dict[str, Any]], settings: dict[str, Any], phrases: tuple[str, ...]
) -> None:
    text = only(name, history(*changes), **settings)
    for phrase in phrases:
        assert phrase in text
    assert settings_in(text) or "state_dir" in text or "OMP_NUM_THREADS" in text
    for setting in settings_in(text):
        section, key = setting.split(".")
        assert key in type(getattr(Config(), section)).model_fields, (
            f"{setting} is named and does not exist"
        )
    assert name in (ROOT / "docs" / "how-to" / "operations.md").read_text()


def test_there_is_no_hint_when_all_is_well_or_unknown() -> None:
    for settings in ({}, ASYNC):
        assert hints(history({}), config(**settings)) == {}
    # A distance that is small, or was as large before, is no move.
    for began, now in ((0.0001, 0.01), (0.1, 0.11)):
        kls = [{"update": {"kl_reference": kl}} for kl in [began] * 5 + [now] * 5]
        assert hints(history(*kls), config()) == {}
    worst = history({"truncated": 1.0, "accuracy": 0.0}, healthy=0)
    assert hints(worst[: WINDOW - 1], config()) == {}
    assert set(hints(worst, config())) == {"truncated"}


@pytest.mark.parametrize("stage", ["generation", "publish", "reward", "replay", "waiting"])
def test_one_long_step_is_an_incident_and_no_habit(stage: str) -> None:
    """The router was gone for ten minutes; the usual step is as healthy as before."""
    lines = history({"seconds": {stage: 600.0}}, {})
    assert hints(lines, config()) == {}
    assert hints(history({"seconds": {stage: 600.0}}), config())


def test_there_is_no_hint_in_a_healthy_run() -> None:
    """The metrics of a real run: the tiny task on two busy cores (`jobgroup.local` with
    tiny-cpu.yaml)."""
    lines = read_lines(ROOT / "tests" / "golden" / "healthy_metrics.jsonl")
    assert len(lines) > WINDOW
    for count in range(1, len(lines) + 1):
        assert hints(lines[:count], config(trainer__batch_size=32)) == {}


def test_there_is_no_hint_for_what_improves_by_itself() -> None:
    rising = [{"unparsable": 0.6, "reward": 0.05 * i, "accuracy": 0.55} for i in range(WINDOW)]
    assert hints(history(*rising), config()) == {}
    learns = [{"update": {"entropy": 0.04}, "accuracy": 0.3 + 0.05 * i} for i in range(WINDOW)]
    assert hints(history(*learns), config()) == {}
    assert hints(history({"update": {"entropy": 0.01}, "accuracy": 0.95}), config()) == {}  # solved
    assert (
        hints(history({"truncated": 0.4, "accuracy": 0.7}), config()) == {}
    )  # long answers, but right ones


def test_a_reward_that_never_changed_is_named_with_its_value() -> None:
    """A function that catches its own errors and returns 0 looks like answers that are all
    wrong."""
    equal = {"zero_variance_groups": 10, "solved_groups": 0, "failed_groups": 10, "accuracy": 0.0}
    zero = [HEALTHY | equal | {"reward": 0.0} for _ in range(FIRST + WINDOW)]
    text = only("zero_variance_groups", zero)
    assert "every answer got the reward 0" in text
    assert "an error or a time-out that it catches itself" in text

    unrated = equal | {"accuracy": None, "solved_groups": None, "failed_groups": None}
    same = [HEALTHY | unrated | {"reward": 0.25} for _ in range(FIRST + WINDOW)]
    text = only("zero_variance_groups", same)
    assert "every answer got the same reward, 0.25" in text
    assert "with a data set of chats they are lists of messages, not texts" in text
    changes = [same[0] | {"reward": 0.1}, *same[1:]]
    assert "every answer got" not in only("zero_variance_groups", changes)


def test_a_reward_function_that_never_tells_answers_apart_is_named_among_several() -> None:
    numbers = [{"math": 0.1 * (i % 5), "tagged": 0.0} for i in range(FIRST + WINDOW)]
    lines = [HEALTHY | {"rewards": rewards} for rewards in numbers]
    assert "since the first step: tagged (0)" in only("dead_reward", lines)
    learned = [HEALTHY | {"rewards": {"math": 0.1, "tagged": 0.9}}, *lines[1:]]
    assert hints(learned, config()) == {}


@pytest.mark.parametrize("functions", [1, 2, 3])
def test_one_of_two_reward_functions_that_never_changes_is_named(functions: int) -> None:
    """A single one makes all groups equal, which another hint says."""
    lines = []
    for step, line in enumerate(history({})):
        changing = {f"changing{number}": step / 40 for number in range(functions - 1)}
        lines.append(line | {"rewards": {"still": 0.25, **changing}})
    found = hints(lines, config())
    assert ("dead_reward" in found) == (functions > 1)
    if functions > 1:
        assert "still (0.25)" in found["dead_reward"]
        assert "changing" not in found["dead_reward"]


@pytest.mark.parametrize("began", [0.0, 0.2, 0.6, 0.9])
@pytest.mark.parametrize("now", [0.0, 0.5, 0.95, 1.0])
def test_answers_fall_apart_when_more_of_them_have_no_end_than_in_the_first_step(
    began: float, now: float
) -> None:
    whole = HEALTHY | {"reward": 0.5, "accuracy": 0.5, "truncated": began, "unparsable": 0.0}
    broken = whole | {"reward": 0.0, "accuracy": 0.0, "truncated": 0.0, "unparsable": now}
    lines = [whole, broken, broken, broken]
    is_broken = now - began >= HINTS["policy_breaks"].limit
    assert ("policy_breaks" in hints(lines, config())) == is_broken


def test_shorter_answers_that_are_right_more_often_are_no_problem() -> None:
    better = [{"completion_tokens": 60.0, "accuracy": 0.5 + 0.04 * i} for i in range(WINDOW)]
    assert hints(history(*better), config()) == {}


def test_shorter_answers_are_no_problem_after_accuracy_has_risen_and_stays() -> None:
    """A model that has learned to end its answers keeps them short for the rest of the run."""
    learned = {"completion_tokens": 100.0, "accuracy": 0.62}
    assert hints(history(learned), config()) == {}
    lost = {"completion_tokens": 100.0, "accuracy": 0.4}
    assert "from 300 to 100 tokens" in only("short_answers", history(lost))


def test_accuracy_that_differs_from_step_to_step_is_no_hack_while_the_reward_rises() -> None:
    """With few prompts a step, ten steps are easily 0.05 below the first five by chance."""
    accuracies = [0.6, 0.5, 0.7, 0.4, 0.6, *(0.4, 0.6, 0.5, 0.55, 0.4, 0.6, 0.45, 0.5, 0.6, 0.4)]
    lines = [HEALTHY | {"accuracy": accuracy, "reward": 0.3} for accuracy in accuracies]
    lines[FIRST:] = [line | {"reward": 0.4} for line in lines[FIRST:]]
    assert hints(lines, config()) == {}


def test_a_reward_that_rises_with_accuracy_is_no_hack() -> None:
    assert hints(history({"reward": 0.8, "accuracy": 0.7}), config()) == {}


def test_replaced_groups_of_dynamic_sampling_count_too() -> None:
    lines = history(
        *(
            {"zero_variance_groups": 0, "solved_groups": 0, "dropped": {"zero_variance": 40 * i}}
            for i in range(1, 11)
        )
    )
    text = only("zero_variance_groups", lines, algorithm__dynamic_sampling=True)
    assert text.startswith("80% of the groups")
    assert "algorithm.dynamic_sampling" not in text


def test_a_resumed_process_counts_drops_anew() -> None:
    lines = history(
        {"dropped": {"reward": 500}}, {"dropped": {"reward": 500}}, {"dropped": {"reward": 3}}
    )
    assert hints(lines, config()) == {}


@pytest.mark.parametrize(("before", "now", "dropped"), [(0, 30, 30), (20, 60, 40), (500, 30, 30)])
def test_what_a_resumed_process_has_dropped_is_reported(
    before: int, now: int, dropped: int
) -> None:
    """A count that has fallen began at 0 since."""
    lines = history({"dropped": {"reward": now}}, healthy=0)
    lines.insert(0, HEALTHY | {"dropped": {"reward": before}})
    assert f"{dropped} groups" in only("dropped_reward", lines)


def test_a_history_stays_short_and_gives_the_same_hints() -> None:
    whole = [HEALTHY] * 40 + history(
        {"dropped": {"stale": 20}, "update": {"entropy": 0.04}}, healthy=0
    )
    kept: list[Any] = []
    for line in whole:
        remember(kept, line)
    assert len(kept) == FIRST + WINDOW + 1
    assert hints(kept, config()) == hints(whole, config())
    assert set(hints(kept, config())) == {"dropped_stale", "entropy"}
