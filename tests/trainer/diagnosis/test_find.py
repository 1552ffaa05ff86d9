"""What is found in the facts of real runs: each line of `diagnosed_runs.jsonl` was recorded from a run of the demo after the
fault that it names, by `trainer.diagnosis.live.collect`, and shortened. Then faults are planted into the numbers of the healthy
one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from common.process.watchdog import Awaited
from tests.support.paths import ROOT
from trainer.diagnosis.facts import Facts, LogLine, RankFacts
from trainer.diagnosis.find import find
from trainer.diagnosis.report import as_json, first_line, lines, text
from trainer.observe import catalogue
from trainer.timing import WAITS_FOR_BATCH

GOLDEN = ROOT / "tests" / "golden"
RECORDED = [json.loads(line) for line in (GOLDEN / "diagnosed_runs.jsonl").read_text().splitlines()]


def recorded(name: str) -> Facts:
    """Returns the facts of a run, which a test may change."""
    found = next(each["facts"] for each in RECORDED if each["recorded"] == name)
    return Facts.model_validate_json(json.dumps(found))


def healthy() -> Facts:
    return recorded("healthy")


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: str(each["recorded"]))
def test_the_first_finding_of_a_real_run_is_its_fault(each: dict[str, Any]) -> None:
    facts = Facts.model_validate(each["facts"])
    findings = find(facts)
    assert (findings[0].name if findings else "") == each["expected"]

    shown = lines(facts, findings)
    assert len(shown) == 5 if findings else len(shown) <= 2
    assert shown[0] == first_line(facts, findings)
    assert all("\n" not in line for line in shown)
    assert as_json(facts, findings)["first_line"] == shown[0]
    assert text(facts, findings).startswith(shown[0])


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: str(each["recorded"]))
def test_a_reworded_run_has_the_same_findings(each: dict[str, Any]) -> None:
    """No sentence of ours is read, only codes and fields; `MemoryError` and the like are foreign."""
    facts = Facts.model_validate(each["facts"])
    before = [(finding.name, finding.level, finding.since) for finding in find(facts)]
    for line in facts.lines:
        line.text = "words"
    if facts.end:
        facts.end.text = "words"
    for service in facts.services:
        service.text = "words"
    after = [(finding.name, finding.level, finding.since) for finding in find(facts)]
    assert after == before


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: str(each["recorded"]))
def test_the_fault_began_after_the_last_step_before_it(each: dict[str, Any]) -> None:
    facts = Facts.model_validate(each["facts"])
    for finding in find(facts)[:1]:
        if finding.since is not None:
            assert (facts.started or 0.0) <= finding.since <= facts.now


def test_a_healthy_run_has_no_finding_at_any_of_its_steps() -> None:
    """The numbers of a healthy demo, as they grew."""
    text = (GOLDEN / "healthy_metrics.jsonl").read_text()
    steps = [json.loads(line) for line in text.splitlines()]
    facts = healthy()
    ended = facts.started or 0.0
    for line in steps:
        ended += sum(line["seconds"].values())
        line["time"] = ended
    for count in range(1, len(steps) + 1):
        facts.steps = steps[max(0, count - 24) : count]
        facts.now = facts.steps[-1]["time"] + 1.0
        assert find(facts) == []


def changed(**numbers: Any) -> Callable[[Facts], None]:
    """Returns a function that sets numbers of the newest three steps."""

    def change(facts: Facts) -> None:
        for line in facts.steps[-3:]:
            for name, value in numbers.items():
                section, _, key = name.partition("__")
                if key:
                    line[section] = {**line.get(section, {}), key: value}
                else:
                    line[section] = value

    return change


def drawn_twice(facts: Facts) -> None:
    """The stream begins anew: the prompts of an earlier step at new positions."""
    again = json.loads(json.dumps(facts.groups[0]))
    again["step"] = facts.step + 1
    for group in again["groups"]:
        group["position"] += 10_000
    facts.groups.append(again)


def one_position_twice(facts: Facts) -> None:
    facts.groups[-1]["groups"][0]["position"] = facts.groups[0]["groups"][0]["position"]


def another_release(facts: Facts) -> None:
    facts.services[-1].release = "0.0.9"


def alarmed(name: str, text: str, kind: str = "alarms") -> Callable[[Facts], None]:
    """Returns a function that adds an alarm to the newest step."""

    def change(facts: Facts) -> None:
        facts.steps[-1][kind] = {**facts.steps[-1].get(kind, {}), name: text}

    return change


def hinted(name: str, text: str) -> Callable[[Facts], None]:
    return alarmed(name, text, "hints")


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (changed(update__skipped=1), catalogue.NOT_FINITE),
        (changed(reward=float("nan")), catalogue.NOT_FINITE),
        (changed(zero_variance_groups=32, accuracy=0.0), catalogue.EQUAL_REWARDS),
        (changed(staleness=3.0), catalogue.OLD_WEIGHTS),
        (drawn_twice, catalogue.DRAWN_TWICE),
        (one_position_twice, catalogue.DRAWN_TWICE),
        (another_release, catalogue.VERSIONS_DIFFER),
        (alarmed("delta_logprob", "mean |Δ logprob| is 0.3. Likely: filters"), "delta_logprob"),
    ],
)
def test_a_planted_fault_is_the_first_finding(plant: Callable[[Facts], None], name: str) -> None:
    facts = healthy()
    plant(facts)
    found = find(facts)
    assert [finding.name for finding in found[:1]] == [name]
    assert found[0].remedy


def test_a_solved_task_with_equal_answers_is_no_fault() -> None:
    facts = healthy()
    changed(zero_variance_groups=32, accuracy=1.0, update__entropy=0.01)(facts)
    assert find(facts) == []


def ranks(*stacks: str) -> list[RankFacts]:
    found = []
    for number, stack in enumerate(stacks):
        rank = RankFacts(rank=number, name=f"rank {number}", answered=bool(stack))
        rank.place = "the update of step 9"
        rank.since_s = 60.0
        rank.collective = "all_reduce" if stack == "all_reduce" else ""
        rank.stacks = f'thread MainThread:\n  File "own.py", line 1, in {stack}'
        found.append(rank)
    return found


def test_the_rank_that_is_not_in_the_collective_is_the_stuck_one() -> None:
    facts = healthy()
    facts.now += 60.0
    facts.ranks = ranks("all_reduce", "dead_lock", "all_reduce")
    found = find(facts)
    assert found[0].name == catalogue.RANK_STUCK
    assert found[0].what.startswith("rank 1 is at: the update of step 9, in dead_lock")
    assert len(found[0].evidence) == 2


def test_ranks_that_are_all_in_collectives_are_stuck_if_these_differ() -> None:
    facts = healthy()
    facts.now += 60.0
    facts.ranks = ranks("all_reduce", "all_reduce")
    assert catalogue.RANK_STUCK not in [finding.name for finding in find(facts)]
    facts.ranks[1].collective = "all_gather"
    assert find(facts)[0].name == catalogue.RANK_STUCK
    assert len(find(facts)[0].evidence) == 2


def test_a_rank_that_does_not_answer_is_stuck_only_if_the_run_is() -> None:
    facts = healthy()
    facts.ranks = ranks("all_reduce", "")
    assert find(facts) == []  # a busy machine
    facts.now += 60.0
    assert find(facts)[0].what == "rank 1 does not answer"


@pytest.mark.parametrize(
    ("reason", "detail", "expected"),
    [
        ("reward", "an answer could not be graded: nan is not a number", catalogue.NOT_GRADED),
        ("teacher", "it has no log-probabilities", catalogue.NOT_GENERATED),
    ],
)
def test_groups_that_are_dropped_again_and_again(reason: str, detail: str, expected: str) -> None:
    facts = healthy()
    for number in range(3):
        line = LogLine(
            source="ppo-trainer-rank0",
            time=facts.now + number,
            level="WARNING",
            logger="trainer.rollouts.collector",
            text=f"dropped the group of prompt p{number}: {reason}: {detail}",
            code="group_dropped",
            fields={"reason": reason},
        )
        facts.lines.append(line)
    finding = next(each for each in find(facts) if "groups were dropped" in each.what)
    assert finding.name == expected
    assert finding.what.startswith(f"3 groups were dropped ({reason})")


def test_the_service_that_an_error_names_is_quoted_and_no_other() -> None:
    facts = healthy()
    facts.state = "ended"
    facts.steps = []
    facts.end = LogLine(source="ppo-trainer", time=facts.now, text="error: something that is new")
    facts.end.fields = {"service": "reward-server"}
    facts.lines = [
        LogLine(source=source, time=facts.now, level="ERROR", logger="x", text=text)
        for source, text in (("reward-server", "the cause"), ("data-server", "unrelated"))
    ]
    finding = find(facts)[0]
    assert any("the cause" in each for each in finding.evidence)
    assert not any("unrelated" in each for each in finding.evidence)


def test_a_hanging_router_comes_before_the_engines_that_it_does_not_list() -> None:
    found = find(recorded("router_stopped_22s"))
    assert found[0].name == catalogue.ENGINE_HANGS
    assert found[0].what == "router: no answer within 2 s"
    assert any("does not list it" in text for text in found[0].evidence)


def test_that_no_batch_comes_is_said_after_its_cause() -> None:
    found = [finding.name for finding in find(recorded("reward_function_hangs_22s"))]
    assert found == [catalogue.NOT_GRADED, catalogue.NO_BATCH]


@pytest.mark.parametrize(
    ("tokens_per_s", "name"), [(9000.0, catalogue.ENGINES_BUSY), (0.0, catalogue.NO_BATCH)]
)
def test_a_run_waits_for_busy_engines_or_for_idle_ones(tokens_per_s: float, name: str) -> None:
    facts = healthy()
    silent(facts, 1200.0)
    facts.ranks = ranks("wait")
    facts.ranks[0].place = f"{WAITS_FOR_BATCH} 7"
    call = Awaited(call="POST /generate", service="rollout-server", seconds=1100.0, count=54)
    facts.ranks[0].awaited = [call]
    for node in facts.services:
        if node.name.startswith("rollout-server"):
            node.running = 109
            node.waiting = 27
            node.tokens_per_s = tokens_per_s
    found = find(facts)
    assert [finding.name for finding in found] == [name]
    if tokens_per_s:
        assert found[0].level == "slow"
        assert "109 completions run, 27 wait" in found[0].evidence[0]


def test_a_reason_that_was_logged_before_the_last_step_still_counts() -> None:
    """The reward-server logs every reason of a function once."""
    facts = recorded("reward_function_hangs_22s")
    failed = next(line for line in facts.lines if line.code == "reward_function_failed")
    failed.time = facts.steps[-1]["time"] - 600.0
    first = find(facts)[0]
    assert first.name == catalogue.NOT_GRADED
    assert first.since == facts.steps[-1]["time"]

    for rank in facts.ranks:
        rank.awaited = []
    assert find(facts)[0].name == catalogue.NO_BATCH  # nobody waits for a grade


def test_a_function_that_fails_now_and_then_is_no_finding_while_steps_go_on() -> None:
    facts = recorded("reward_function_hangs_22s")
    facts.steps[-1]["time"] = facts.now - 1.0
    for service in facts.services:
        service.since_s = 0.0
    assert catalogue.NOT_GRADED not in [finding.name for finding in find(facts)]


@pytest.mark.parametrize(("restarts", "begin"), [(True, "nothing"), (None, "nothing"), (False, "")])
def test_a_dead_job_group_restarts_nothing(restarts: bool | None, begin: str) -> None:
    facts = recorded("rank1_killed_4s")
    facts.restarts = restarts
    remedy = find(facts)[0].remedy
    assert remedy.startswith(begin or "start it again")


def test_what_kept_a_run_from_its_first_step_began_with_the_wait_for_it() -> None:
    facts = recorded("dns")
    assert facts.started is not None
    assert find(facts)[0].since == facts.started
    wait = LogLine(
        source="ppo-trainer-rank0",
        time=facts.started + 20.0,
        level="WARNING",
        logger="common.clients.base",
        text="words",
        code="waiting",
        fields={"service": "data-server", "problem": "unknown_name", "seconds": "5"},
    )
    earlier = wait.model_copy(update={"time": facts.started + 10.0})
    facts.lines = [wait, *facts.lines]
    assert find(facts)[0].since == facts.started + 15.0
    facts.lines = [earlier, *facts.lines]
    assert find(facts)[0].since == facts.started + 5.0


def test_rank_zero_says_itself_why_it_failed() -> None:
    """The other ranks repeat its error without what makes it a wrong setting."""
    facts = recorded("disk_of_run")
    facts.steps = []
    why = "a reward function failed for a made-up answer: reward: TypeError"
    facts.end = LogLine(source="ppo-trainer", time=facts.now, text=f"error: {why}", code="config")
    facts.end.fields = {"field": "reward.functions", "remedy": "correct the function"}
    repeated = f"rank 0 on ppo-trainer-0 (127.0.0.1) has failed: ConfigError: {why}"
    line = LogLine(source="ppo-trainer-rank1", time=facts.exited, level="ERROR", text=repeated)
    line.code = "rank_lost"
    line.fields = {"number": "0", "how": "failed"}
    facts.lines = [line]
    found = find(facts)
    assert found[0].name == catalogue.WRONG_SETTING
    assert found[0].remedy == "correct the function"


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (hinted("policy_breaks", "the answers fell apart. Lower it"), "policy_breaks"),
        (hinted("policy_moves", "the policy moves too far. Lower it"), "policy_moves"),
        (alarmed("same_prompts", "different problems. Likely: the template"), "same_prompts"),
        (changed(staleness=3.0), catalogue.OLD_WEIGHTS),
        (hinted("dropped_reward", "40 groups (10%) were dropped (reward)"), "dropped_reward"),
        (drawn_twice, catalogue.DRAWN_TWICE),
    ],
)
def test_equal_rewards_come_after_what_causes_them(
    plant: Callable[[Facts], None], cause: str
) -> None:
    facts = healthy()
    changed(zero_variance_groups=32, accuracy=0.0)(facts)
    hinted("zero_variance_groups", "100% of the groups. The prompts are too hard")(facts)
    hinted("truncated", "all are cut. Raise it")(facts)
    plant(facts)
    found = [finding.name for finding in find(facts)]
    assert found == [cause, "truncated", "zero_variance_groups", catalogue.EQUAL_REWARDS]


def silent(facts: Facts, seconds: float) -> None:
    """Every process answers, and no step ends."""
    facts.now = facts.steps[-1]["time"] + seconds


def test_a_run_without_a_step_is_never_called_well() -> None:
    facts = healthy()
    silent(facts, 1.0)
    assert lines(facts, find(facts))[0].startswith("nothing is wrong: running, step ")
    usual_s = facts.usual_step_s
    silent(facts, 3 * usual_s + 6.0)
    assert find(facts) == []
    assert "nothing is wrong" not in lines(facts, [])[0]
    assert f"one usually takes {usual_s:.2g} s" in lines(facts, [])[0]

    silent(facts, 600.0)
    facts.ranks = ranks("wait")
    call = Awaited(call="PUT /weights", service="rollout-server-0", seconds=599.0, count=1)
    facts.ranks[0].awaited = [call]
    found = find(facts)
    assert [finding.name for finding in found] == [catalogue.NO_STEP]
    evidence = "rank 0 waits for PUT /weights from rollout-server-0 for 599 s"
    assert evidence in found[0].evidence

    facts.ranks = []
    text = "waiting for 30 s for 4 groups; active now: generation 1"
    facts.lines = [LogLine(source="ppo-trainer-rank0", time=facts.now - 9.0, text=text)]
    assert find(facts)[0].evidence == [f"ppo-trainer-rank0: {text}"], "a run in one process"


def test_a_run_that_starts_is_not_called_well() -> None:
    facts = healthy()
    facts.state = "starting"
    facts.steps = []
    facts.started = facts.now - 400.0
    assert lines(facts, [])[0] == "starting for 400 s, no step yet; no fault is known"
