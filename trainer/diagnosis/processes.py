"""Findings from what the living processes of a run answer. Pure."""

from collections.abc import Iterator

from trainer.diagnosis.facts import (
    Facts,
    Finding,
    Level,
    RankFacts,
    ServiceFacts,
    finding,
)
from trainer.diagnosis.health import ROUTER
from trainer.observe import catalogue
from trainer.observe.catalogue import Fault, fault_in_text, fault_of_service
from trainer.timing import WAITS_FOR_BATCH

_SHORTEST_STALL_S = 15.0
_STEPS_OF_STALL = 5.0
"""A run is stalled when it has not finished a step for this many times a step's usual seconds."""
_WAITS_S = 3.0
"""Seconds after which a pending call counts as a wait: longer than polls take."""


def stalled_for(facts: Facts) -> float:
    """Returns the seconds since the last step if they are too many; 0 for a run that goes on."""
    if facts.state != "running":
        return 0.0
    limit_s = max(_SHORTEST_STALL_S, _STEPS_OF_STALL * facts.usual_step_s)
    return facts.silent_s if facts.silent_s > limit_s else 0.0


def from_processes(facts: Facts) -> Iterator[Finding]:
    """Yields the findings about services and ranks, the causes first."""
    if not facts.lives:
        return
    stall_s = stalled_for(facts)
    yield from _services(facts, stall_s)
    yield from _ranks(facts, stall_s)
    yield from _no_batch(facts, stall_s)
    yield from _versions(facts)


def _services(facts: Facts, stall_s: float) -> Iterator[Finding]:
    unhealthy = [each for each in facts.services if each.state != "healthy"]
    # What a hanging router does not list is its effect.
    unhealthy.sort(key=lambda each: each.name != ROUTER)
    for service in unhealthy:
        if service.problem == "not_ready" and not stall_s:
            continue  # a part of a start, or of an update
        name, what = _of_service(service)
        evidence = [f"{service.name}: {service.text}", *_waits(facts, service.name)]
        level: Level = "stalled" if stall_s else "harm"
        found = _finding(name, what, facts, evidence=evidence, level=level)
        if service.since_s > 1:
            found.since = facts.now - service.since_s
        yield found


def _waits(facts: Facts, task: str = "") -> list[str]:
    """Returns the calls that ranks and services wait for, of this task or of all."""
    if task == ROUTER:
        task = "rollout-server"
    waiting: list[RankFacts | ServiceFacts] = [*facts.ranks, *facts.services]
    return [
        f"{each.name} waits for {call.call} from {call.service} for {call.seconds:.0f} s"
        for each in waiting
        for call in each.awaited
        if call.seconds > _WAITS_S and task in ("", call.service)
    ]


def _of_service(service: ServiceFacts) -> tuple[Fault, str]:
    """Returns the name and the sentence of what is wrong with a service."""
    who = service.name
    problem = service.problem
    said = f"{who}: {service.text}"
    if service.of_engine:
        return fault_of_service("engine", problem), f"that of {said}"
    if fault_in_text(service.text) == catalogue.DISK_OF_RUN:
        return fault_of_service(who, "disk_full"), said
    if service.reported == "stale":
        return catalogue.OLD_WEIGHTS, said
    if service.reported in ("failed", "starting"):
        return catalogue.ENGINE_DIES, f"that of {said}"
    if problem == "not_ready" and who.startswith("rollout-server"):
        return catalogue.ENGINE_HANGS, said
    if problem == "not_ready" and who == ROUTER:
        return catalogue.ENGINE_DIES, f"the router {service.text}"
    if problem in ("not_ready", "error"):
        return catalogue.SERVICE_HANGS, f"{who} is not ready: {service.text}"
    return fault_of_service(who, problem), said


def _ranks(facts: Facts, stall_s: float) -> Iterator[Finding]:
    if facts.trainer_problem and facts.state == "running":
        yield from _rank_zero(facts, stall_s)
        return
    if not stall_s:
        return

    silent = [rank.name for rank in facts.ranks if not rank.answered]
    waiting = [rank for rank in facts.ranks if rank.collective]
    late = [rank for rank in facts.ranks if rank.answered and not rank.collective]
    # A collective needs all ranks: who is missing from it is the one that is stuck.
    if silent:
        what = f"{' and '.join(silent)} does not answer"
    elif not waiting or any(rank.awaited or _waits_for_batch(rank) for rank in late):
        return  # rank 0 waits for a service, and the others for rank 0
    elif late:
        names = " and ".join(rank.name for rank in late)
        what = f"{names} is at: {late[0].place}, in {innermost(late[0].stacks)}"
    elif len({rank.collective for rank in waiting}) > 1:  # none of them ever ends
        what = "the ranks are in different collectives"
    else:
        return
    waits = [f"{rank.name} waits in {rank.collective} ({rank.place})" for rank in waiting]
    yield _finding(catalogue.RANK_STUCK, what, facts, evidence=waits)


def _rank_zero(facts: Facts, stall_s: float) -> Iterator[Finding]:
    if facts.trainer_problem == "silent" and stall_s:
        what = "rank 0 does not answer, and its process lives"
        evidence = ["GET /ranks has no answer"]
        yield _finding(catalogue.RANK_STUCK, what, facts, evidence=evidence)
    elif facts.trainer_problem == "unauthorized":
        yield _finding(
            catalogue.WRONG_TOKEN,
            "the trainer rejects the token of this command",
            facts,
            evidence=["API_TOKEN of this shell is not that of the run"],
            remedy="set API_TOKEN to that of the run; it is not known what its services do",
            level="slow",
        )


def _waits_for_batch(rank: RankFacts) -> bool:
    return rank.answered and rank.place.startswith(WAITS_FOR_BATCH)


def innermost(stacks: str) -> str:
    """Returns the function at the end of the main thread's stack."""
    main = stacks.partition("\nthread ")[0].rstrip().splitlines()
    frames = [line.strip() for line in main if line.strip().startswith("File ")]
    return frames[-1].rpartition(" in ")[2] if frames else "no Python code"


def _no_batch(facts: Facts, stall_s: float) -> Iterator[Finding]:
    leaders = [rank for rank in facts.ranks if rank.rank == 0 and _waits_for_batch(rank)]
    if not stall_s or not leaders:
        return
    leader = leaders[0]
    what = f"rank 0 is at: {leader.place}, for {leader.since_s:.0f} s"
    busy = [each for each in facts.services if each.running and each.tokens_per_s]
    if busy:  # a batch takes as long as its answers
        said = [
            f"{each.name} generates {each.tokens_per_s:,.0f} tokens per second: {each.running:,} "
            f"completions run, {each.waiting:,} wait"
            for each in busy
        ]
        yield _finding(catalogue.ENGINES_BUSY, what, facts, evidence=said, level="slow")
        return
    oldest = next(iter(leader.awaited), None)
    if oldest is not None and oldest.seconds > _SHORTEST_STALL_S / 2:
        what += f"; {oldest.service} has not answered {oldest.call}"
    evidence = _waits(facts) or ["no call is in flight"]
    yield _finding(catalogue.NO_BATCH, what, facts, evidence=evidence)


def no_step(facts: Facts) -> Iterator[Finding]:
    """Yields a finding for a run that has made no step for too long. It is for runs in which
    nothing else was found: with a connection that never answers, every service and rank is healthy.
    """
    stall_s = stalled_for(facts)
    if not stall_s:
        return
    what = f"{stall_s:.0f} s without a step, and one usually takes {facts.usual_step_s:.2g} s"
    places = [f"{rank.name} is at: {rank.place}" for rank in facts.ranks if rank.answered]
    said = [line.said for line in facts.lines if (line.time or 0.0) > facts.now - stall_s]
    unknown = ["its processes were not asked, and its logs do not say why"]
    evidence = [*_waits(facts), *places] or said[-1:] or unknown
    yield _finding(catalogue.NO_STEP, what, facts, evidence=evidence)


def _versions(facts: Facts) -> Iterator[Finding]:
    own = facts.versions.get("rlhf-math")
    others = [
        f"{service.name} has {service.release}"
        for service in facts.services
        if service.release not in ("", own)
    ]
    if own and others:
        what = f"the trainer has {own}, {', '.join(others)}"
        yield finding(catalogue.VERSIONS_DIFFER, what, facts.started, level="harm")


def _finding(
    fault: Fault,
    what: str,
    facts: Facts,
    *,
    evidence: list[str],
    remedy: str = "",
    level: Level = "stalled",
) -> Finding:
    since = max(filter(None, (facts.last, facts.started)), default=None)
    return finding(fault, what, since, level=level, evidence=evidence, remedy=remedy)
