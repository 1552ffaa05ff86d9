"""What is found in facts that a test makes up: which fault, since when, by what evidence."""

import itertools
import math
import random
from typing import Any

import pytest

from common.process.watchdog import Awaited
from trainer.diagnosis.facts import Facts, Finding, LogLine, RankFacts, ServiceFacts
from trainer.diagnosis.find import find
from trainer.diagnosis.messages import from_messages
from trainer.diagnosis.processes import from_processes, innermost, stalled_for
from trainer.diagnosis.report import as_json, first_line, text, where
from trainer.observe import catalogue

NOW = 1.8e9


def steps(count: int, seconds: float = 2.0, **more: Any) -> list[dict[str, Any]]:
    """Returns the lines of steps of which the last one has just ended."""
    return [
        {
            "step": step,
            "time": NOW - seconds * (count - step),
            "seconds": {"update": seconds},
            "reward": 0.5,
            "accuracy": 0.5,
            "update": {"loss": 0.1},
            **more,
        }
        for step in range(1, count + 1)
    ]


def facts(**fields: Any) -> Facts:
    made = {"directory": "run", "now": NOW, "state": "running", "steps": steps(5)}
    return Facts(**(made | fields))


def line(code: str, text: str = "words", at: float | None = NOW, **fields: str) -> LogLine:
    source = fields.pop("source", "ppo-trainer-rank0")
    return LogLine(
        source=source, time=at, level="ERROR", logger="run", text=text, code=code, fields=fields
    )


def named(found: list[Finding], name: str) -> Finding:
    [finding] = [finding for finding in found if finding.name == name]
    return finding


@pytest.mark.parametrize("seed", range(40))
def test_how_long_a_run_is_silent_and_when_that_is_a_stall(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([0, 1, 4])
    seconds = [draw.uniform(0.1, 9) for _ in range(count)]
    lines: list[dict[str, Any]] = [
        {"step": n, "time": NOW - draw.uniform(0, 90), "seconds": {"update": each, "reward": each}}
        for n, each in enumerate(seconds, 1)
    ]
    started = draw.choice([None, NOW - draw.uniform(0, 400)])
    state = draw.choice(["running", "running", "starting", "ended"])
    known = facts(steps=lines, started=started, state=state)
    times = [each for each in (started, lines[-1]["time"] if lines else None) if each]
    silent = NOW - max(times) if times else 0.0
    assert known.silent_s == pytest.approx(silent)
    ordered = sorted(2 * each for each in seconds) or [60.0]
    usual = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
    assert known.usual_step_s == pytest.approx(usual)
    is_stalled = state == "running" and silent > max(15.0, 5 * usual)
    assert stalled_for(known) == (pytest.approx(silent) if is_stalled else 0.0)


def test_two_reports_of_one_fault_are_one_that_began_with_the_first() -> None:
    """A service that hangs is seen by who waits for it and by who asks for its health."""
    known = facts(now=NOW + 100)
    known.services = [
        ServiceFacts(name="data-server", state="dead", text="no", problem="refused", since_s=30.0)
    ]
    waits = [
        line("waiting", f"line {n}", NOW + n, service="data-server", problem="refused", seconds="5")
        for n in range(4)
    ]
    for order in (waits, waits[::-1]):
        known.lines = order
        finding = named(find(known), catalogue.DATA_DIES)
        assert finding.since == min(NOW + 70, order[-1].time - 5)  # type: ignore[operator]
        assert finding.level == "stalled"
        assert finding.evidence == ["data-server: no", order[-1].said]


EQUAL = "zero_variance_groups"


@pytest.mark.parametrize("advantage", ["group", "none"])
@pytest.mark.parametrize("equal", list(itertools.product([3, 4], repeat=4)))
def test_equal_rewards_are_a_fault_after_three_steps_in_a_row(
    equal: tuple[int, ...], advantage: str
) -> None:
    lines = steps(4)
    for each, count in zip(lines, equal, strict=True):
        each[EQUAL] = count
    config = {"trainer.batch_size": 4, "algorithm.advantage": advantage}
    found = find(facts(steps=lines, config=config))
    if equal[1:] != (4, 4, 4) or advantage == "none":
        assert found == []
        return
    since = lines[0 if equal[0] == 4 else 1]["time"]
    assert named(found, catalogue.EQUAL_REWARDS).since == since
    assert "mean reward 0.500" in found[0].what
    lines[-1]["accuracy"] = 0.95
    assert find(facts(steps=lines, config=config)) == [], "solved"


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("name", ["reward", "loss", "skipped", "lr"])
def test_numbers_of_the_newest_three_steps_must_be_finite(place: int, name: str) -> None:
    lines = steps(5)
    if name == "reward":
        lines[place]["reward"] = math.nan
    else:
        bad: Any = 2 if name == "skipped" else math.inf
        lines[place]["update"] = {"loss": 0.1, name: bad}
    found = find(facts(steps=lines))
    if place < 2:
        assert found == []
        return
    finding = named(found, catalogue.NOT_FINITE)
    words = {"reward": "reward of", "skipped": "2 updates were skipped"}
    assert words.get(name, f"update.{name} of") in finding.what
    assert f"step {place + 1}" in finding.what
    assert (finding.since, finding.level) == (lines[place]["time"], "harm")


@pytest.mark.parametrize("allowed", [None, 0, 2])
@pytest.mark.parametrize("age", [0.4, 2.4, 2.6])
@pytest.mark.parametrize("when_stale", ["drop", "train"])
def test_experience_may_be_as_old_as_the_settings_say(
    allowed: int | None, age: float, when_stale: str
) -> None:
    config = {"trainer.max_staleness": allowed, "trainer.when_stale": when_stale}
    found = find(facts(steps=steps(3, staleness=age), config=config))
    is_old = when_stale == "drop" and allowed is not None and age > allowed + 0.5
    assert [finding.name for finding in found] == [catalogue.OLD_WEIGHTS] * is_old


def test_an_alarm_lasts_since_the_first_of_the_steps_in_a_row() -> None:
    lines = steps(5)
    for number in (0, 2, 3, 4):
        lines[number]["alarms"] = {"kl_rollout": "It is far. Lower the rate. Or not"}
    lines[4]["hints"] = {"nothing_active": "Nothing is done"}
    found = find(facts(steps=lines))
    alarm = named(found, "kl_rollout")
    assert (alarm.what, alarm.remedy) == ("It is far", "Lower the rate. Or not")
    assert (alarm.since, alarm.level) == (lines[2]["time"], "harm")
    hint = named(found, "nothing_active")
    assert (hint.since, hint.level) == (lines[4]["time"], "slow")
    assert hint.remedy


@pytest.mark.parametrize("restarts", [True, False, None])
@pytest.mark.parametrize("how", ["died", "silent", "stuck", "failed", "stopped"])
@pytest.mark.parametrize("number", ["0", "1"])
def test_the_rank_that_was_lost_is_named_unless_rank_zero_tells_it_itself(
    number: str, how: str, restarts: bool | None
) -> None:
    lost = line("rank_lost", "It is lost", number=number, how=how)
    lost.fields["cause"] = "out_of_memory"
    place = line("rank_place", 'File "a.py", line 1, in f\nFile "b.py", line 2, in g', rank="r1")
    killed = [line("rank_killed", f"killed {number}") for number in range(2)]
    end = line("", "error: rank 0 ends", NOW + 1)
    known = facts(state="ended", restarts=restarts, end=end, lines=[*killed, lost, place])
    found = list(from_messages(known))
    tells_itself = how == "stopped" or (how == "failed" and number == "0")
    if tells_itself:
        assert found[0].name == catalogue.ENDED
        return
    [finding] = found
    faults = {"died": catalogue.RANK_DIES, "failed": catalogue.RANK_MEMORY}
    fault = faults.get(how, catalogue.RANK_STUCK)
    assert (finding.name, finding.what, finding.since) == (fault, "It is lost", NOW)
    nobody_restarts = how == "died" and restarts is False
    assert finding.remedy == (catalogue.KILLED if nobody_restarts else fault).remedy
    assert finding.evidence == ["killed 1", lost.said, "r1 was in g"]


def test_a_rank_that_failed_with_an_unknown_error_has_its_own_remedy() -> None:
    lost = line("rank_lost", number="1", how="failed", remedy="Do this. And that")
    known = facts(state="ended", lines=[lost])
    [finding] = from_messages(known)
    assert (finding.name, finding.remedy) == (catalogue.ENDED, "Do this. And that")


@pytest.mark.parametrize("holder", [{}, {"pid": 7, "host": "node-1"}])
@pytest.mark.parametrize("has_killer", [False, True])
def test_a_run_that_was_killed_names_who_had_it_and_who_killed_it(
    holder: dict[str, Any], has_killer: bool
) -> None:
    killer = line("rank_killed", "the kernel ended it", NOW + 1)
    known = facts(state="killed", holder=holder, lines=[killer] if has_killer else [])
    finding = named(find(known), catalogue.KILLED)
    who = "process 7 on node-1" if holder else "its process"
    assert finding.what == f"{who} is gone"
    assert finding.level == "stopped"
    if has_killer:
        assert (finding.since, finding.evidence) == (NOW + 1, ["the kernel ended it"])
    else:
        assert finding.since == NOW
        [said] = finding.evidence
        assert said.startswith(who)


@pytest.mark.parametrize("is_stalled", [False, True])
@pytest.mark.parametrize("state", ["warning", "dead", "healthy"])
@pytest.mark.parametrize(
    ("name", "fields", "fault"),
    [
        ("data-server", {"problem": "not_ready"}, catalogue.SERVICE_HANGS),
        ("data-server", {"problem": "error"}, catalogue.SERVICE_HANGS),
        ("data-server", {"problem": "refused"}, catalogue.DATA_DIES),
        ("router", {"problem": "not_ready"}, catalogue.ENGINE_DIES),
        ("router", {"problem": "refused"}, catalogue.ROUTER_DIES),
        ("rollout-server-0", {"problem": "not_ready"}, catalogue.ENGINE_HANGS),
        ("rollout-server-0", {"problem": "refused"}, catalogue.NODE_DIES),
        ("rollout-server-0", {"problem": "not_ready", "reported": "stale"}, catalogue.OLD_WEIGHTS),
        ("rollout-server-0", {"problem": "error", "reported": "failed"}, catalogue.ENGINE_DIES),
        ("rollout-server-0", {"problem": "silent", "of_engine": True}, catalogue.ENGINE_HANGS),
    ],
)
def test_a_service_that_is_not_healthy_has_the_fault_of_its_kind(
    name: str, fields: dict[str, Any], fault: str, state: Any, is_stalled: bool
) -> None:
    waiting = Awaited(call="POST /x", service="rollout-server", seconds=9.0, count=1)
    rank = RankFacts(rank=0, name="rank 0", answered=True, awaited=[waiting])
    rank.awaited.append(waiting.model_copy(update={"seconds": 1.0}))
    known = facts(now=NOW + (99 if is_stalled else 0), ranks=[rank])
    known.services = [ServiceFacts(name=name, state=state, text="said", since_s=7.0, **fields)]
    found = list(from_processes(known))
    is_usual = fields["problem"] == "not_ready" and not is_stalled
    if state == "healthy" or is_usual:
        assert found == []
        return
    [finding] = found
    assert finding.name == fault
    assert finding.level == ("stalled" if is_stalled else "harm")
    assert finding.since == known.now - 7.0
    waits = ["rank 0 waits for POST /x from rollout-server for 9 s"] * (name == "router")
    assert finding.evidence == [f"{name}: said", *waits]


@pytest.mark.parametrize("problem", ["", "silent", "unauthorized", "refused"])
@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_trainer_that_does_not_answer_is_stuck_or_rejects_the_token(
    problem: str, is_stalled: bool
) -> None:
    known = facts(now=NOW + (99 if is_stalled else 0), trainer_problem=problem)
    found = [(each.name, each.level) for each in from_processes(known)]
    expected = []
    if problem == "silent" and is_stalled:
        expected = [(catalogue.RANK_STUCK, "stalled")]
    if problem == "unauthorized":
        expected = [(catalogue.WRONG_TOKEN, "slow")]
    assert found == expected


def test_the_report_for_programs_has_all_that_is_known() -> None:
    rank = RankFacts(rank=1, name="rank 1", answered=True, place="the update", since_s=3.0)
    rank.stacks = "thread MainThread:\n  File x, line 1, in f"
    rank.awaited = [Awaited(call=f"GET /{n}", service="s", seconds=n, count=1) for n in range(4)]
    silent = RankFacts(rank=2, name="rank 2", answered=False)
    service = ServiceFacts(name="data-server", state="dead", text="gone")
    end = line("", "the end")
    known = facts(
        state="ended",
        ranks=[rank, silent],
        services=[service],
        end=end,
        versions={"torch": "2"},
    )
    content = as_json(known, [])
    assert content["state"] == "ended"
    assert content["run"] == "run"
    assert content["end"]["text"] == "the end"
    assert [each["name"] for each in content["ranks"]] == ["rank 1", "rank 2"]
    assert [each["name"] for each in content["services"]] == ["data-server"]
    assert content["versions"] == {"torch": "2"}
    whole = text(known, [])
    assert f"stacks of rank 1\n{rank.stacks}\n" in whole
    assert "stacks of rank 2" not in whole
    assert "data-server: dead: gone" in whole
    waits = "GET /0 from s for 0 s, GET /1 from s for 1 s, GET /2 from s for 2 s\n"
    assert f"rank 1 is at: the update, for 3 s; waits for {waits}" in whole
    assert where(silent) == "rank 2 does not answer"
    assert "torch 2" in whole


@pytest.mark.parametrize(("count", "total"), [(0, None), (3, 3), (3, None)])
@pytest.mark.parametrize("state", ["empty", "starting", "running", "finished", "ended", "killed"])
def test_a_run_without_a_fault_is_told_by_its_state(state: Any, count: int, total: Any) -> None:
    known = facts(state=state, steps=steps(count, total_steps=total), started=NOW - 4)
    said = first_line(known, [])
    assert (f"step {count} of {total}" in said) == (total is not None and state != "empty")
    assert state in said
    assert (f"{known.silent_s:.0f} s" in said) == (state in ("running", "starting"))


def test_the_function_at_the_end_of_a_stack_is_that_of_the_first_thread() -> None:
    stacks = 'thread MainThread:\n  File "a", line 1, in f\n  File "b", line 2, in g\n    g in h\n'
    assert innermost(stacks + '\nthread other:\n  File "c", line 3, in k') == "g"
    assert innermost("thread MainThread:\n") == "no Python code"
