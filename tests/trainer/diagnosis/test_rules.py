"""Each rule of a diagnosis over random facts, with its definition in a few lines."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from common.process.watchdog import Awaited
from trainer.diagnosis.facts import Facts, Finding, LogLine, RankFacts, ServiceFacts
from trainer.diagnosis.find import find
from trainer.diagnosis.messages import fault_of, from_messages
from trainer.diagnosis.processes import from_processes
from trainer.diagnosis.report import as_json, first_line, last_lines, lines, page, text, where
from trainer.observe import catalogue
from trainer.timing import WAITS_FOR_BATCH

NOW = 1.8e9
TRAINER = "ppo-trainer-rank0"


def said(
    code: str,
    text: str = "words",
    at: float | None = NOW,
    *,
    source: str = TRAINER,
    level: str = "WARNING",
    logger: str = "run",
    **fields: str,
) -> LogLine:
    return LogLine(
        source=source, time=at, level=level, logger=logger, text=text, code=code, fields=fields
    )


def random_facts(draw: random.Random) -> Facts:
    """Returns the facts of a run of any state, without lines."""
    count = draw.choice([0, 1, 4])
    last = NOW - draw.choice([0.0, 20.0, 300.0])
    steps = [
        {"step": n, "time": last - 2.0 * (count - n), "seconds": {"update": 2.0}, "reward": 0.5}
        for n in range(1, count + 1)
    ]
    state = draw.choice(["running", "starting", "ended", "killed", "finished", "empty"])
    end = None
    if state == "ended":
        at = draw.choice([None, NOW, NOW - 10.0])
        end = said("", "error: the end", at, level="CRITICAL", logger="end")
    started = draw.choice([None, NOW - 30.0, NOW - 400.0])
    return Facts(
        directory="run", now=NOW, state=state, steps=steps, started=started, end=end, lines=[]
    )


def recent(facts: Facts) -> list[LogLine]:
    """Returns the lines that may say why a run does not go on: those since its newest step, or of
    the last 90 s of a run that has ended."""
    begin = 0.0
    if facts.steps:
        begin = max(facts.steps[-1]["time"], facts.started or 0.0)
    if facts.end and facts.end.time and facts.state not in ("running", "starting"):
        begin = min(begin, facts.end.time - 90.0)
    return [line for line in facts.lines if line.time is None or line.time >= begin]


def level_of(facts: Facts) -> str:
    return "stalled" if facts.state in ("running", "starting") else "stopped"


def after_the_end(facts: Facts) -> list[Finding]:
    """Returns the findings of the logs, without those of the end itself."""
    found = list(from_messages(facts))
    has_end = facts.state == "killed" or (facts.state == "ended" and facts.end is not None)
    return found[1:] if has_end else found


@pytest.mark.parametrize("seed", range(60))
def test_a_wait_counts_since_the_last_step(seed: int) -> None:
    draw = random.Random(seed)
    facts = random_facts(draw)
    for number in range(draw.randint(0, 6)):
        ago = draw.choice([None, 0.0, 15.0, 20.0, 25.0, 90.0, 100.0, 101.0, 350.0])
        facts.lines.append(
            said(
                draw.choice(["waiting", "waiting", "other"]),
                f"line {number}",
                None if ago is None else NOW - ago,
                source=draw.choice([TRAINER, "sft-rank0", "data-server"]),
                service=draw.choice(["data-server", "reward-server", "nobody"]),
                problem="refused",
                **draw.choice([{}, {"seconds": "7"}, {"seconds": "many"}]),
            )
        )
    newest: dict[str, LogLine] = {}
    for line in recent(facts):
        is_wait = line.code == "waiting" and line.source != "data-server"
        if is_wait and line.fields["service"] != "nobody":
            newest[line.fields["service"]] = line
    dies = {"data-server": catalogue.DATA_DIES, "reward-server": catalogue.REWARD_DIES}
    expected = [
        Finding(
            name=dies[service],
            what=line.text,
            since=(NOW if line.time is None else line.time)
            - (7.0 if line.fields.get("seconds") == "7" else 0.0),
            evidence=[f"{line.source}: {line.text}"],
            remedy=dies[service].remedy,
            level=level_of(facts),
        )
        for service, line in newest.items()
    ]
    assert after_the_end(facts) == ([] if facts.state == "finished" else expected)


@pytest.mark.parametrize("seed", range(60))
def test_groups_that_are_dropped_and_nodes_that_are_behind_count_since_the_last_step(
    seed: int,
) -> None:
    draw = random.Random(seed)
    facts = random_facts(draw)
    for number in range(draw.randint(0, 12)):
        code = draw.choice(["group_dropped", "node_stale", "nodes_behind", "unauthorized"])
        fields = draw.choice([{}, {"problem": "disk_full"}]) if code.startswith("node") else {}
        if code == "group_dropped":
            fields = {"reason": draw.choice(["reward", "generation"])}
        at = NOW - draw.choice([0.0, 19.0, 350.0])
        facts.lines.append(said(code, f"line {number}", at, source="rollout-server-0", **fields))
    known = recent(facts)
    expected: list[tuple[Any, ...]] = []
    by_reason: dict[str, list[LogLine]] = {}
    for line in known:
        if line.code == "group_dropped":
            by_reason.setdefault(line.fields["reason"], []).append(line)
    for reason, dropped in by_reason.items():
        if len(dropped) < 3:
            continue
        fault = catalogue.NOT_GRADED if reason == "reward" else catalogue.NOT_GENERATED
        words = f"{len(dropped)} groups were dropped ({reason}), such as: {dropped[-1].text}"
        level = "harm" if level_of(facts) == "stalled" else "stopped"
        expected.append((fault, words, dropped[0].time, level, dropped[-1].said))
    behind = [
        line
        for line in known
        if line.code == "node_stale" or (line.code == "nodes_behind" and line.fields)
    ]
    for line in behind[-1:]:
        fault = catalogue.DISK_OF_NODE if line.fields else catalogue.OLD_WEIGHTS
        words = f"rollout-server-0: {line.text}"
        expected.append((fault, words, line.time, level_of(facts), line.said))
    found = [(f.name, f.what, f.since, f.level, f.evidence[0]) for f in after_the_end(facts)]
    assert found == ([] if facts.state == "finished" else expected)


@pytest.mark.parametrize("state", ["running", "starting", "ended"])
@pytest.mark.parametrize("silent_s", [1.0, 100.0])
@pytest.mark.parametrize("awaits", ["reward-server", "data-server"])
@pytest.mark.parametrize("is_old", [True, False])
def test_each_reward_function_that_fails_is_named_once_a_run_stalls(
    state: Any, silent_s: float, awaits: str, is_old: bool
) -> None:
    last = NOW - silent_s
    rank = RankFacts(rank=0, name="rank 0", answered=True)
    rank.awaited = [Awaited(call="POST /rewards", service=awaits, seconds=9.0, count=1)]
    at = last - 500.0 if is_old else last
    failures = [
        said("reward_function_failed", f"{name} failed", at, source="reward-server", function=name)
        for name in ("f", "g", "f")
    ]
    facts = Facts(directory="run", now=NOW, state=state, ranks=[rank], lines=failures)
    facts.started = NOW - 900.0
    facts.steps = [{"step": 1, "time": last, "seconds": {"update": 2.0}}]
    found = [each for each in from_messages(facts) if each.name == catalogue.NOT_GRADED]
    is_stuck = state == "ended" or (state == "running" and silent_s == 100.0)
    counts = is_stuck and (not is_old or awaits == "reward-server")
    assert [each.what for each in found] == ["f failed", "g failed"] * counts
    for each in found:
        assert (each.since, each.evidence) == (last, [f"reward-server: {each.what}"])
        assert each.level == ("stopped" if state == "ended" else "stalled")
    if counts:
        facts.steps = []
        facts.state = "ended"
        [first, _] = from_messages(facts)
        assert first.since == facts.started


def random_word(draw: random.Random) -> LogLine:
    """Returns a line that may be the last word of a task."""
    fields = draw.choice([{}, {"field": "trainer.x", "value": "7"}, {"field": "row"}])
    fields |= draw.choice([{}, {"remedy": "do this"}])
    logger, level = draw.choice([("", ""), ("end", "CRITICAL"), ("end", "ERROR"), ("run", "ERROR")])
    return said(
        draw.choice(["", "", "unfit_model"]),
        f"word {draw.randrange(100)}",
        draw.choice([None, NOW, NOW - 89.0, NOW - 91.0, NOW + 89.0, NOW + 91.0]),
        source=draw.choice(["data-server", "rollout-server-0", TRAINER]),
        level=level,
        logger=logger,
        **fields,
    )


def last_word(facts: Facts) -> Iterator[tuple[Any, ...]]:
    """Yields what is told of the newest last word of a task at the end of the run, if any."""
    for line in reversed(facts.lines):
        is_near = not (line.time and facts.end and facts.end.time) or (
            abs(facts.end.time - line.time) <= 90.0
        )
        is_word = line.logger == "" or (line.logger, line.level) == ("end", "CRITICAL")
        if line.source == TRAINER or not is_word or not is_near:
            continue
        field = line.fields.get("field", "")
        fault = catalogue.WRONG_SETTING if field == "trainer.x" else catalogue.TASK_FAILED
        if line.code:
            fault = catalogue.ENGINE_CANNOT
        shown = {"trainer.x": ["trainer.x is 7"], "row": ["row"], "": []}[field]
        remedy = line.fields.get("remedy", fault.remedy)
        evidence = [f"the last line of {line.source}", *shown]
        yield fault, f"{line.source}: {line.text}", line.time, evidence, remedy
        return


@pytest.mark.parametrize("seed", range(60))
def test_the_task_that_failed_is_named_by_its_last_word(seed: int) -> None:
    draw = random.Random(seed)
    words = [random_word(draw) for _ in range(draw.randint(0, 5))]
    state = draw.choice(["empty", "starting", "ended"])
    facts = Facts(directory="run", now=NOW, state=state, lines=words)
    if state == "ended":
        at = draw.choice([None, NOW])
        facts.end = said("interrupted", "interrupted", at, level="CRITICAL", logger="end")
    expected = list(last_word(facts))
    found = list(from_messages(facts))
    if state == "ended":
        last = found.pop()
        assert (last.name, last.what) == (catalogue.INTERRUPTED, "by SIGTERM or Ctrl-C")
        assert (last.since, last.level) == (facts.exited, "stopped")
    told = [(each.name, each.what, each.since, each.evidence, each.remedy) for each in found]
    assert told == expected
    assert {each.level for each in found} <= {"stopped"}


@pytest.mark.parametrize("seed", range(60))
def test_the_end_of_a_run_has_its_field_its_remedy_and_the_last_error_behind_it(seed: int) -> None:
    draw = random.Random(seed)
    facts = random_facts(draw)
    facts.state = draw.choice(["ended", "finished"])
    field = draw.choice(["", "trainer.batch_size", "--port", "API_TOKEN", "seed", "state_dir", "x"])
    service = draw.choice(["", "reward-server"])
    code = draw.choice(["", "unreachable", "not_graded"])
    fields = {"field": field, "service": service, "remedy": draw.choice(["", "do this"])}
    fields["problem"] = "refused"
    if draw.random() < 0.5:
        fields["value"] = "7"
    facts.end = said(
        code,
        "error: it ends\nand more",
        draw.choice([None, NOW]),
        level="CRITICAL",
        logger="end",
        **{name: value for name, value in fields.items() if value},
    )
    facts.lines = [
        said(
            "",
            f"line {number}",
            NOW,
            source=draw.choice(["reward-server", "data-server", TRAINER]),
            level=draw.choice(["WARNING", "ERROR", "CRITICAL", ""]),
        )
        for number in range(draw.randint(0, 5))
    ]
    waits = [
        said("waiting", "wait", draw.choice([None, NOW - 5.0, NOW]), seconds=str(n), **about)
        for n, about in enumerate(
            draw.choices(
                [
                    {"service": "reward-server", "problem": "refused"},
                    {"service": "data-server", "problem": "refused"},
                    {"service": "nobody"},
                ],
                k=draw.randint(0, 3),
            )
        )
    ]
    facts.lines += waits
    found = next(from_messages(facts))

    fault = catalogue.ENDED
    if code == "unreachable" and service:
        fault = catalogue.REWARD_DIES
    elif code == "not_graded":
        fault = catalogue.NOT_GRADED
    elif field not in ("", "x") and not facts.steps:
        fault = catalogue.WRONG_SETTING
    assert (found.name, found.level) == (fault, "stopped")
    assert found.what == "it ends"
    began = [
        line.time - float(line.fields["seconds"])
        for line in waits
        if line in recent(facts) and line.time is not None and fault_of(line) == fault
    ]
    usual = (None if facts.steps else facts.started) or facts.end.time
    assert found.since == min(began, default=usual)
    remedy = "" if code == "unreachable" else fields["remedy"]
    assert found.remedy == (remedy or fault.remedy)
    evidence = []
    if field:
        evidence = [f"{field} is 7" if "value" in fields else field]
    errors = [
        line
        for line in recent(facts)
        if line.level in ("ERROR", "CRITICAL", "")
        and (line.source == service if service else line.source != TRAINER)
    ]
    assert found.evidence == [*evidence, *(line.said for line in errors[-1:])]


PLACES: list[tuple[str, dict[str, str], str, str, str]] = [
    ("disk_full", {"field": "state_dir"}, "data-server", "", catalogue.DISK_OF_SERVICE),
    ("disk_full", {"field": "state_dir"}, "rollout-server-1", "", catalogue.DISK_OF_NODE),
    ("disk_full", {"field": "trainer.run_dir"}, TRAINER, "", catalogue.DISK_OF_RUN),
    ("disk_full", {"service": "replay-buffer"}, TRAINER, "", catalogue.DISK_OF_SERVICE),
    ("", {"field": "state_dir"}, "data-server", "", catalogue.ENDED),
    ("node_stale", {"problem": "disk_full"}, "rollout-server-0", "", catalogue.DISK_OF_NODE),
    ("node_stale", {}, "rollout-server-0", "No space left on device", catalogue.DISK_OF_NODE),
    ("nodes_behind", {}, "rollout-server-0", "", catalogue.OLD_WEIGHTS),
    ("config", {}, TRAINER, "No space left on device", catalogue.DISK_OF_RUN),
    (
        "service_lost",
        {"service": "router", "problem": "silent"},
        "",
        "",
        catalogue.ENGINE_OF_PROCESS,
    ),
    ("service_lost", {"service": "reward-server"}, "", "", catalogue.CANNOT_START),
    ("waiting", {"service": "rollout-server", "problem": "silent"}, "", "", catalogue.ENGINE_HANGS),
    ("unreachable", {"service": "rollout-server-2"}, "", "", catalogue.NODE_DIES),
    ("unreachable", {}, "", "", catalogue.ENDED),
    ("config", {"service": "data-server", "problem": "refused"}, "", "", catalogue.ENDED),
    ("x", {"cause": "out_of_memory"}, "", "", catalogue.RANK_MEMORY),
    ("unauthorized", {"cause": "unheard_of"}, "", "", catalogue.WRONG_TOKEN),
    ("x", {"cause": "waiting", "service": "router"}, "", "", catalogue.ROUTER_DIES),
    ("x", {"reason": "reward"}, "", "", catalogue.NOT_GRADED),
    ("x", {"reason": "stale"}, "", "", catalogue.NOT_GENERATED),
    ("unauthorized", {"reason": "reward"}, "", "", catalogue.WRONG_TOKEN),
]


@pytest.mark.parametrize(("code", "fields", "source", "words", "fault"), PLACES)
def test_an_error_means_what_its_code_says_of_its_place(
    code: str, fields: dict[str, str], source: str, words: str, fault: str
) -> None:
    assert fault_of(said(code, words, NOW, source=source, **fields)) == fault


@pytest.mark.parametrize("seed", range(60))
def test_a_position_or_an_order_of_prompts_comes_once(seed: int) -> None:
    draw = random.Random(seed)
    first = draw.randrange(5)
    made: list[dict[str, Any]] = []
    for step in range(1, 6):
        groups: list[dict[str, Any]] = [
            {
                "position": draw.choice([10 * step + place, 10 * step + place, None, 1]),
                "prompt_id": f"p{draw.choice([place, 10 * step + place + first])}",
                "reused": draw.random() < 0.3,
            }
            for place in range(2)
        ]
        draw.shuffle(groups)
        made.append({"step": step, "groups": groups})
    steps = [
        {"step": step, "time": NOW + step, "seconds": {"update": 60.0}} for step in range(1, 6)
    ]
    facts = Facts(directory="run", now=NOW + 6, state="running", steps=steps, groups=made)

    expected = None
    seen: dict[Any, int] = {}
    for line in made:
        fresh = [each for each in line["groups"] if not each["reused"]]
        fresh = [each for each in fresh if each["position"] is not None]
        fresh.sort(key=lambda each: each["position"])
        names = tuple(each["prompt_id"] for each in fresh)
        keys: list[Any] = [each["position"] for each in fresh]
        keys += [names] * (len(set(names)) > 1)
        for key in keys:
            before = seen.setdefault(key, line["step"])
            if before != line["step"] and expected is None:
                what = f"position {key} in the steps {before} and {line['step']}"
                if key == names:
                    what = (
                        f"step {line['step']} has the prompts of step {before}, in the same order"
                    )
                expected = (what, NOW + line["step"])
    found = [each for each in find(facts) if each.name == catalogue.DRAWN_TWICE]
    assert [(each.what, each.since) for each in found] == ([expected] if expected else [])


def rank(number: int, **fields: Any) -> RankFacts:
    made = {"rank": number, "name": f"rank {number}", "answered": True, "place": "the update"}
    stacks = f'thread MainThread:\n  File "own.py", line 1, in f{number}\n'
    return RankFacts(**(made | {"stacks": stacks, "since_s": 9.0} | fields))


@pytest.mark.parametrize("seed", range(60))
def test_the_rank_that_a_collective_lacks_is_stuck(seed: int) -> None:
    draw = random.Random(seed)
    call = Awaited(call="GET /x", service="data-server", seconds=5.0, count=1)
    facts = Facts(directory="run", now=NOW, state=draw.choice(["running", "running", "starting"]))
    facts.started = NOW - 500.0
    facts.steps = [{"step": 1, "time": NOW - draw.choice([5.0, 90.0]), "seconds": {"update": 2.0}}]
    for number in range(draw.randint(1, 3)):
        made = rank(number, answered=draw.random() < 0.9)
        if made.answered:
            made.collective = draw.choice(["", "all_reduce", "all_reduce", "barrier"])
        if not made.collective and draw.random() < 0.2:
            made.awaited = [call]
        if not made.collective and draw.random() < 0.2:
            made.place = f"{WAITS_FOR_BATCH} 7"
        facts.ranks.append(made)
    found = [each for each in from_processes(facts) if each.name == catalogue.RANK_STUCK]

    is_stalled = facts.state == "running" and facts.steps[0]["time"] == NOW - 90.0
    silent = [each.name for each in facts.ranks if not each.answered]
    inside = [each for each in facts.ranks if each.collective]
    late = [each for each in facts.ranks if each.answered and not each.collective]
    waits_itself = any(each.awaited or each.place != "the update" for each in late)
    what = None
    if silent:
        what = f"{' and '.join(silent)} does not answer"
    elif inside and late and not waits_itself:
        names = " and ".join(each.name for each in late)
        what = f"{names} is at: the update, in f{late[0].rank}"
    elif not late and len({each.collective for each in inside}) > 1:
        what = "the ranks are in different collectives"
    if not is_stalled or what is None:
        assert found == []
        return
    [finding] = found
    assert (finding.what, finding.since, finding.level) == (what, NOW - 90.0, "stalled")
    waits = [f"{each.name} waits in {each.collective} (the update)" for each in inside]
    assert finding.evidence == waits


@pytest.mark.parametrize("seed", range(60))
def test_a_run_without_a_batch_names_what_rank_zero_waits_for(seed: int) -> None:
    draw = random.Random(seed)
    stall_s = draw.choice([14.0, 90.0])
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 900.0)
    facts.steps = [{"step": 1, "time": NOW - stall_s, "seconds": {"update": 2.0}}]
    waits = [
        Awaited(
            call=f"GET /{n}",
            service="data-server",
            seconds=draw.choice([2.9, 3.1, 7.4, 7.6]),
            count=1,
        )
        for n in range(draw.randint(0, 2))
    ]
    place = draw.choice([f"{WAITS_FOR_BATCH} 7", "the update"])
    leader = rank(0, place=place, awaited=waits, answered=draw.random() < 0.9)
    facts.ranks = draw.sample([leader, rank(1, place=f"{WAITS_FOR_BATCH} 7")], 2)
    speeds: list[float | None] = [draw.choice([None, 0.0, 1500.0]) for _ in range(2)]
    facts.services = [
        ServiceFacts(
            name=f"rollout-server-{n}", state="healthy", running=draw.choice([0, 4]), waiting=1200
        ).model_copy(update={"tokens_per_s": speed})
        for n, speed in enumerate(speeds)
    ]
    found = find(facts)
    long = [each for each in waits if each.seconds > 3.0]
    told = [f"rank 0 waits for {w.call} from data-server for {w.seconds:.0f} s" for w in long]
    if stall_s == 14.0:
        assert found == []
        return
    [finding] = found
    busy = [each for each in facts.services if each.running and each.tokens_per_s]
    if not leader.answered:
        assert finding.name == catalogue.RANK_STUCK
    elif place == "the update":
        assert finding.name == catalogue.NO_STEP
        assert finding.what == "90 s without a step, and one usually takes 2 s"
        places = [f"{each.name} is at: {each.place}" for each in facts.ranks if each.answered]
        assert finding.evidence == [*told, *places]
    elif busy:
        assert (finding.name, finding.level) == (catalogue.ENGINES_BUSY, "slow")
        assert finding.evidence == [
            f"{each.name} generates 1,500 tokens per second: 4 completions run, 1,200 wait"
            for each in busy
        ]
    else:
        assert (finding.name, finding.level) == (catalogue.NO_BATCH, "stalled")
        what = f"rank 0 is at: {place}, for 9 s"
        if waits and waits[0].seconds > 7.5:
            what += "; data-server has not answered GET /0"
        assert finding.what == what
        assert finding.evidence == (told or ["no call is in flight"])
    assert finding.since == NOW - 90.0


def test_a_run_whose_processes_say_nothing_has_the_last_line_of_its_stall() -> None:
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 900.0)
    facts.steps = [{"step": 1, "time": NOW - 90.0, "seconds": {"update": 0.5}}]
    facts.lines = [said("", "before", NOW - 90.0), said("", "untimed", None)]
    [finding] = find(facts)
    assert finding.name == catalogue.NO_STEP
    assert finding.what == "90 s without a step, and one usually takes 0.5 s"
    assert finding.evidence == ["its processes were not asked, and its logs do not say why"]
    facts.lines[:0] = [said("", "first", NOW - 60.0), said("", "second", NOW - 30.0)]
    assert find(facts)[0].evidence == [f"{TRAINER}: second"]
    facts.trainer_problem = "unauthorized"
    token, no_step = sorted(find(facts), key=lambda each: each.name)
    assert (token.level, token.name) == ("slow", catalogue.WRONG_TOKEN)
    assert "API_TOKEN" in token.remedy
    assert no_step.name == catalogue.NO_STEP


@pytest.mark.parametrize("own", ["1.0", None])
def test_services_of_another_version_are_named(own: str | None) -> None:
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 5.0)
    facts.versions = {"rlhf-math": own} if own else {}
    facts.services = [
        ServiceFacts(name=f"s{n}", state="healthy", release=release)
        for n, release in enumerate(["1.0", "", "1.1", "0.9"])
    ]
    found = find(facts)
    if own is None:
        assert found == []
        return
    [finding] = found
    assert (finding.name, finding.since) == (catalogue.VERSIONS_DIFFER, NOW - 5.0)
    assert finding.what == "the trainer has 1.0, s2 has 1.1, s3 has 0.9"
    assert finding.level == "harm"


@pytest.mark.parametrize(
    ("name", "fields", "fault", "what"),
    [
        ("rollout-server-0", {"text": "No space left"}, catalogue.DISK_OF_NODE, "{}"),
        ("data-server", {"text": "No space left"}, catalogue.DISK_OF_SERVICE, "{}"),
        ("rollout-server-1", {"of_engine": True}, catalogue.ENGINE_DIES, "that of {}"),
        ("rollout-server-1", {"reported": "stale"}, catalogue.OLD_WEIGHTS, "{}"),
        ("rollout-server-1", {"reported": "starting"}, catalogue.ENGINE_DIES, "that of {}"),
        ("rollout-server-1", {"reported": "failed"}, catalogue.ENGINE_DIES, "that of {}"),
        ("rollout-server-1", {"problem": "not_ready"}, catalogue.ENGINE_HANGS, "{}"),
        ("router", {"problem": "not_ready"}, catalogue.ENGINE_DIES, "the router said"),
        ("environment-server-0", {"problem": "silent"}, catalogue.ENVIRONMENT_DIES, "{}"),
        ("reward-server", {"problem": "silent"}, catalogue.SERVICE_HANGS, "{}"),
        ("reward-server", {"problem": "lost"}, catalogue.CANNOT_START, "{}"),
        ("reward-server", {"problem": "error"}, catalogue.SERVICE_HANGS, "reward-server is not ready: said"),
        ("unheard-of", {"problem": "refused"}, catalogue.ENDED, "{}"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_service_is_told_of_the_right_part(
    name: str, fields: dict[str, Any], fault: str, what: str
) -> None:
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 90.0)
    facts.steps = [{"step": 1, "time": NOW - 80.0, "seconds": {"update": 2.0}}]
    made = {"name": name, "state": "warning", "text": "said", "problem": "refused"}
    for since_s, since in ((1.0, NOW - 80.0), (1.5, NOW - 1.5)):
        service = ServiceFacts(**(made | {"since_s": since_s} | fields))
        facts.services = [service]
        [finding] = from_processes(facts)
        assert finding.name == fault
        assert finding.what == what.format(f"{name}: {service.text}")
        assert (finding.since, finding.level) == (since, "stalled")
        assert finding.evidence == [f"{name}: {service.text}"]


def test_the_newest_step_is_told_with_the_usual_time_of_one() -> None:
    for usual, silent_s in ((1.0, 4.9), (1.0, 5.1), (4.0, 7.9), (4.0, 8.1), (4.0, 5.1)):
        step = {"step": 3, "time": NOW - silent_s, "seconds": {"update": usual}, "total_steps": 9}
        facts = Facts(directory="run", now=NOW, state="running", steps=[step])
        is_late = silent_s > max(5.0, 2 * usual)
        begin = f"running, step 3 of 9, {silent_s:.0f} s ago"
        late = f"{begin}, and one usually takes {usual:.2g} s; no fault is known yet"
        assert first_line(facts, []) == (late if is_late else f"nothing is wrong: {begin}")
    facts.steps = []
    assert first_line(facts, []) == "running for 0 s, no step yet; no fault is known"
    facts.started = NOW - 7.0
    assert first_line(facts, []) == "running for 7 s, no step yet; no fault is known"


def test_no_line_of_a_report_is_long_and_each_has_its_column() -> None:
    facts = Facts(directory="run", now=NOW, state="running")
    step = {"step": 3, "time": NOW - 9.0, "total_steps": 9}
    facts.steps = [step, {"step": 4, "time": NOW}]
    finding = Finding(
        name="slow_update",
        what="w" * 500,
        since=NOW - 1.0,
        evidence=["e\n  " + "f" * 500, "g"],
        remedy="r\n s",
        level="slow",
    )
    first, since, evidence, remedy, more = lines(facts, [finding])
    assert first == f"slow_update: {'w' * 239}…"
    assert since.startswith("since    ")
    assert since.endswith(" (1 s before this report), after step 3")
    assert evidence == f"evidence e {'f' * 235}…; g"
    assert remedy == "remedy   r s"
    assert more == f"more     nothing else is wrong; {page('slow_update')}"
    assert page("slow_update").endswith("#a-run-that-does-not-learn-or-is-slow")
    assert page("A task's `x` ends: why?").endswith("operations.md#a-tasks-x-ends-why")

    facts.lines = [said("", f"{'x' * 500}\nand more")]
    [shown] = last_lines(facts)
    assert len(shown) == 400
    assert f"  {shown}\n" in text(facts, [])
    assert len(facts.lines[0].said) == 400
    content = as_json(facts, [finding])
    assert content["findings"][0]["page"] == page("slow_update")
    assert content["findings"][0]["what"] == "w" * 500
    fields = {"state", "end", "asked", "not_asked", "ranks", "services", "versions", "run"}
    assert content.keys() == fields | {
        "time",
        "step",
        "total_steps",
        "first_line",
        "findings",
        "lines",
    }


def test_the_report_of_a_run_without_a_fault_says_who_was_asked() -> None:
    call = Awaited(call="GET /x", service="data-server", seconds=2.0, count=1)
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 3.0)
    assert lines(facts, [])[1].startswith("asked    the files alone: ")
    facts.asked = True
    facts.services = [ServiceFacts(name="s", state="healthy", text="well", awaited=[call])]
    facts.ranks = [rank(0, awaited=[call], collective="barrier"), rank(1, place="")]
    facts.ranks[1].awaited = [call.model_copy(update={"call": "GET /of-rank-1"})]
    facts.ranks[0].stacks = ""
    asked = (
        "asked    1 services and 2 ranks, which answer; waits for GET /x from data-server for 2 s"
    )
    assert lines(facts, [])[1:] == [asked]
    whole = text(facts, [])
    assert "\nservices\n  s: healthy: well; waits for GET /x from data-server for 2 s\n" in whole
    assert "\nranks\n  rank 0 is at: the update, in barrier, for 9 s; waits for GET /x" in whole
    assert where(facts.ranks[1]) == "rank 1 is at: no place, for 9 s"
    assert whole.count("stacks of") == 1
    assert "\nlast lines that matter" not in whole
    facts.state = "finished"
    assert len(lines(facts, [])) == 1
    findings = [
        Finding(name=f"F {n}", what="w", evidence=["a", "b"], remedy="r", level="harm")
        for n in range(3)
    ]
    whole = text(facts, findings)
    for number in (1, 2):
        assert f"\n\nF {number}: w\nevidence a; b\nremedy   r\n" in whole
    assert "also: F 1; F 2; " in lines(facts, findings)[-1]


@pytest.mark.parametrize("seed", range(60))
def test_reports_of_one_fault_are_put_together_and_the_worst_comes_first(seed: int) -> None:
    """Dead services, waits for them, and alarms: one finding of each name."""
    draw = random.Random(seed)
    facts = Facts(directory="run", now=NOW, state="running", started=NOW - 900.0)
    late = draw.choice([5.0, 90.0])
    names = ["truncated", "kl_rollout", "slow_update", "zero_variance_groups", "format", "other"]
    hints = {name: f"{name} is seen. Do" for name in draw.sample(names, draw.randint(0, 4))}
    facts.steps = [{"step": 1, "time": NOW - late, "seconds": {"update": 2.0}, "hints": hints}]
    facts.services = [
        ServiceFacts(name=name, state="dead", problem="refused", text="gone")
        for name in draw.sample(["data-server", "reward-server", "router"], draw.randint(0, 3))
    ]
    facts.lines = [
        said("waiting", f"line {n}", NOW - n, service="data-server", problem="refused")
        for n in range(draw.randint(0, 1))
    ]
    found = find(facts)
    assert len({each.name for each in found}) == len(found)
    order = ["stopped", "stalled", "harm", "slow"]
    effects = ["format", "truncated", "zero_variance_groups"]
    ranks = [
        (order.index(each.level), 1 + effects.index(each.name) if each.name in effects else 0)
        for each in found
    ]
    assert ranks == sorted(ranks)
    explained = any(each.level == "stalled" for each in found if each.name != catalogue.NO_STEP)
    expected = late == 90.0 and not explained
    assert (catalogue.NO_STEP in [each.name for each in found]) == expected
