"""What the state of a node says after random events, by a model that keeps only what has happened."""

import random
from dataclasses import dataclass

import pytest

from services.rollout.state import UPDATES_BEFORE_RESTART, NodeState
from services.rollout.weights.trainer_client import WeightId


@dataclass
class Model:
    """The facts from which everything follows."""

    engine: str = "starting"
    serves: WeightId | None = None
    admitted: bool = False
    failures: int = 0
    failed_loads: int = 0
    detail: str = ""

    def caught_up(self) -> None:
        self.admitted = True
        self.failures = 0
        self.failed_loads = 0
        self.detail = ""


@pytest.mark.parametrize("seed", range(20))
def test_a_state_is_what_has_happened(seed: int) -> None:
    draw = random.Random(seed)
    versions = [WeightId("run", number) for number in range(3)]
    state = NodeState()
    model = Model()
    for turn in range(80):
        reason = f"reason {turn}"
        match draw.choice(["up", "down", "wanted", "update", "done", "failed", "strayed", "flag"]):
            case "up":
                serves = draw.choice([None, *versions])
                state.engine_up(serves)
                model.engine = "up"
                model.serves = serves
                model.failed_loads = 0
                if state.wanted is None or state.wanted == serves:
                    model.caught_up()
            case "down":
                state.engine_down(reason)
                model = Model("failed", None, False, model.failures, model.failed_loads, reason)
                assert not state.updating
                assert not state.asleep
            case "wanted":
                state.wanted = draw.choice(versions)
            case "update":
                state.updating = True
            case "done":
                serves = draw.choice(versions)
                state.update_done(serves)
                assert not state.updating
                model.serves = serves
                if serves == state.wanted:
                    model.caught_up()
            case "failed":
                engine_failed = draw.random() < 0.5
                state.update_failed(reason, engine_failed)
                assert not state.updating
                model.admitted = False
                model.detail = reason
                model.failures += 1
                model.failed_loads += engine_failed
            case "strayed":
                state.strayed(reason)
                model.serves = None
                model.admitted = False
                model.detail = reason
            case _:
                name = draw.choice(["draining", "asleep", "cut_off"])
                setattr(state, name, draw.random() < 0.5)
        check(state, model)


def check(state: NodeState, model: Model) -> None:
    found = Model(
        state.engine,
        state.serves,
        state.admitted,
        state.failures,
        state.failed_loads,
        state.detail,
    )
    assert found == model
    # The first of these that holds.
    said = [
        ("asleep", state.asleep),
        (model.engine, model.engine != "up"),
        ("updating", state.updating),
        ("stale", model.failures > 0),
        ("ready", model.admitted),
        ("updating", True),
    ]
    shown = next(name for name, holds in said if holds)
    assert state.worker_state == shown
    is_newest = model.engine == "up" and model.admitted and not state.draining
    assert state.is_newest == is_newest
    assert state.in_traffic == (is_newest and not state.cut_off)
    assert state.must_restart == (model.failed_loads >= UPDATES_BEFORE_RESTART)
    waits = 0.5 * 2.0 ** (model.failures - 1) if model.failures else 0.0
    assert state.backoff_s == min(30.0, waits)
    problem = state.problem()
    if state.in_traffic:
        assert problem is None
    elif is_newest:
        assert problem == "the trainer does not answer, or goes on without this engine"
    else:
        wanted = state.wanted
        target = "the base model" if wanted is None else f"weights {wanted.version}"
        detail = f": {model.detail}" if model.detail else ""
        assert problem == f"the engine is {shown}, wanted: {target}{detail}"
