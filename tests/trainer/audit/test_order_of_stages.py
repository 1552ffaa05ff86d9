"""Which stages a re-execution compares and in which order, and what models it loads for them. The
models, the record and the comparisons of single stages are stand-ins.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.process import watchdog
from common.settings.config import from_mapping
from services.engine.sampling import FIELDS
from tests.support.errors import raises
from trainer.algorithms.batch import Batch
from trainer.audit import engine, history, recorded, reexecution, waits
from trainer.audit.comparison import (
    STAGES,
    StageOutcome,
    compare_checksums,
    compare_columns,
    differences,
)
from trainer.audit.episodes import PlayedAgain
from trainer.audit.history import UNREAD_OF_TRAINER, WeightHistory
from trainer.audit.reexecution import StepReexecution
from trainer.observe.audit import Setup
from trainer.policy import checkpoint

STEP = 4
OF_UPDATE = ("logprobs", "advantages", "gradients", "new weights")


class Ranks:
    """One of several ranks, which receives what rank 0 broadcasts."""

    def __init__(self, rank: int) -> None:
        self.is_rank_zero = rank == 0
        self.device = SimpleNamespace(type="cpu")

    def broadcast(self, value: Any) -> Any:
        return value


def again(stages: Any, rank: int = 0, **fields: Any) -> Any:
    """Returns a re-execution that has read its record."""
    made = object.__new__(StepReexecution)
    made.run_dir = Path("run")
    made.step = STEP
    made.stages = stages
    made.outcomes = []
    made.recorded_tools = False
    told: list[StageOutcome] = []
    made.tell = told.append
    start = SimpleNamespace(engine="embedded", given=[], setup="then")
    config = SimpleNamespace(
        reproducible=False,
        environment=SimpleNamespace(name=""),
        lora=SimpleNamespace(publishes_adapter=False),
        model="model",
    )
    known: dict[str, Any] = {
        "recorded": SimpleNamespace(start=start),
        "_record": SimpleNamespace(weights_at=lambda step: f"weights {step}"),
        "_config": config,
        "_ranks": Ranks(rank),
        "_why_rounded": "",
        "told": told,
    }
    for name, value in (known | fields).items():
        setattr(made, name, value)
    return made


class History:
    """The models of a run, whose weights after some step are others."""

    def __init__(self, step: int, wrong: int | None = None) -> None:
        self.policy = SimpleNamespace(step=step, digest=self._digest, model="m")
        self.origin = f"step_{step:06d}"
        self._wrong = wrong

    def _digest(self) -> str:
        step = self.policy.step
        return "others" if step == self._wrong else f"weights {step}"

    def advance(self) -> str:
        self.policy.step += 1
        return f"step {self.policy.step}"


_SUBSETS = st.sets(st.sampled_from(STAGES), min_size=1).map(lambda drawn: sorted(drawn))


@given(
    stages=_SUBSETS,
    rank=st.integers(0, 1),
    is_episodes=st.booleans(),
    is_damaged=st.booleans(),
    has_other_weights=st.booleans(),
    has_checkpoint=st.booleans(),
)
def test_only_wanted_stages_are_computed_in_their_order(
    stages: list[Any],
    rank: int,
    is_episodes: bool,
    is_damaged: bool,
    has_other_weights: bool,
    has_checkpoint: bool,
) -> None:
    made = again(stages, rank, _versions=[2] if "completions" in stages else [])
    made._config.environment.name = "python" if is_episodes else ""
    loaded: list[int] = []
    computed: list[str] = []

    def load(first: int) -> Any:
        loaded.append(first)
        if is_damaged:
            made._add(StageOutcome("weights", "differs", "damaged"))
            return None
        is_step = first == STEP
        return History(STEP if is_step and has_checkpoint else min(first, STEP - 1))

    def bring(history: Any, completions: Any) -> bool:
        computed.append("weights")
        made._add(StageOutcome("weights", "differs" if has_other_weights else "equal", ""))
        history.policy.step = STEP - 1
        return not has_other_weights

    def rewards(rows: Any, played: Any) -> None:
        assert rows == ({"p": 1} if rank == 0 else {})
        assert (played is not None) == (is_episodes and rank == 0 and "weights" in computed)
        if "rewards" in stages:
            made._add(StageOutcome("rewards", "equal", ""))

    def update(updated: Any, why: str) -> list[StageOutcome]:
        assert updated == f"step {STEP}"
        computed.append("update")
        return [StageOutcome(stage, "equal", "") for stage in STAGES if stage in OF_UPDATE]

    made._loaded = load
    made._bring_to_step = bring
    made._compare_rewards = rewards
    played = PlayedAgain(StageOutcome("episodes", "equal", ""))
    made._played = lambda history, rows: played
    outcome = StageOutcome("completions", "equal", "")
    made._completions = lambda given: SimpleNamespace(outcome=lambda: outcome)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reexecution, "load_rows", lambda *_: {"p": 1})
        patch.setattr(
            reexecution, "compare_prompts", lambda *_: StageOutcome("prompts", "equal", "")
        )
        patch.setattr(reexecution, "compare_update", update)
        patch.setattr(reexecution, "config_of", lambda *given: made._config)
        patch.setattr(reexecution, "differences", lambda *given: ["one", "two"])
        patch.setattr(Setup, "here", lambda ranks: "now")
        found = made.run(made._ranks)
    assert made._why_rounded == "one; two"
    assert found == made.told == made.outcomes

    expected: list[tuple[str, str]] = []
    first_loaded = []
    if "checkpoint" in stages:
        first_loaded.append(STEP)
        if is_damaged:
            expected.append(("weights", "differs"))
        else:
            expected.append(("checkpoint", "equal" if has_checkpoint else "not compared"))
    rest = set(stages) - {"checkpoint"}
    cheap = {"prompts"} if is_episodes else {"prompts", "rewards"}
    if rest:
        expected.append(("prompts", "equal"))
    # Where a checkpoint is asked for as well, the models are loaded in any case.
    if rest and set(stages) <= cheap:
        expected.append(("rewards", "equal"))
    elif rest:
        first_loaded.append(2 if "completions" in stages else STEP - 1)
        if is_damaged or has_other_weights:
            expected.append(("weights", "differs"))
        else:
            expected.append(("weights", "equal"))
            if is_episodes:
                expected.append(("episodes", "equal"))
            expected += [("completions", "equal"), ("rewards", "equal")]
            if rest & set(OF_UPDATE):
                expected += [(stage, "equal") for stage in OF_UPDATE]
    assert loaded == first_loaded
    wanted = [each for each in expected if each[0] in stages or each[1] == "differs"]
    assert [(each.stage, each.state) for each in found] == ([] if rank else wanted)


@given(
    begun=st.integers(0, STEP - 1),
    wrong=st.none() | st.integers(0, STEP - 1),
    versions=st.sets(st.integers(0, STEP - 1)).map(sorted),
    is_record_wrong=st.booleans(),
    why=st.sampled_from(["", "torch was 1"]),
)
def test_the_weights_of_every_step_on_the_way_are_verified(
    begun: int, wrong: int | None, versions: list[int], is_record_wrong: bool, why: str
) -> None:
    made = again(list(STAGES), _versions=versions, _why_rounded=why)
    sampled: list[int] = []
    difference = StageOutcome("gradients", "differs", "", "update 0", "1", "2")
    of_update = [StageOutcome("logprobs", "equal", "")]
    of_update += [difference] if is_record_wrong else []
    completions = SimpleNamespace(take=lambda policy: sampled.append(policy.step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reexecution, "compare_update", lambda *_: of_update)
        is_right = made._bring_to_step(History(begun, wrong), completions)
    is_wrong = wrong is not None and wrong >= begun
    # Another rounding explains other weights, unless what the update was made of is another.
    is_explained = is_wrong and wrong != begun and not is_record_wrong and why
    if is_wrong and not is_explained:
        assert not is_right
        step = wrong
        state = "differs"
    else:
        assert is_right
        step = STEP - 1
        state = "not compared" if is_explained and wrong == step else "equal"
    (found,) = made.outcomes
    assert (found.stage, found.state) == ("weights", state)
    what = f"version {step} from step_{begun:06d}"
    assert step is not None
    if step - begun:
        what += f" and {step - begun} recorded update" + ("s" if step - begun > 1 else "")
    assert found.detail.startswith(what)
    before = [each for each in versions if begun <= each <= step]
    assert sampled == ([each for each in before if each != wrong] if not is_right else before)
    if state == "not compared":
        assert found.detail == f"{what}: no bits, because {why}"
    elif state == "differs" and step != begun and is_record_wrong:
        assert found.where == (
            f"the record of step {step} (groups/step_{step:06d}.zip or its line in audit.jsonl), "
            "at gradients: update 0"
        )
        assert (found.expected, found.found) == ("1", "2")
    elif state == "differs":
        assert (found.where, found.expected, found.found) == (what, f"weights {step}", "others")


@given(
    given_=st.sampled_from([[], ["rewards"]]),
    state=st.sampled_from([None, "equal", "not compared"]),
    has_wrong=st.booleans(),
    has_answers=st.booleans(),
    is_wanted=st.booleans(),
    rank=st.integers(0, 1),
)
def test_who_grades_the_answers_again(
    given_: list[str],
    state: Any,
    has_wrong: bool,
    has_answers: bool,
    is_wanted: bool,
    rank: int,
) -> None:
    made = again(["rewards"] if is_wanted else ["prompts"], rank)
    made.recorded.start.given = given_
    made._config.environment.name = "game"
    wrong = StageOutcome("rewards", "differs", "another reward")
    played = None
    if state is not None:
        played = PlayedAgain(
            StageOutcome("episodes", state, "why"),
            given=3,
            wrong_reward=wrong if has_wrong else None,
            answers=["an answer"] if has_answers else [],  # type: ignore[list-item]
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reexecution, "answers_of_groups", lambda recorded, rows: [rows])
        patch.setattr(
            reexecution,
            "graded_again",
            lambda config, answers: StageOutcome("rewards", "equal", f"graded {answers}"),
        )
        made._compare_rewards({"p": 1}, played)
    if not is_wanted or rank:
        assert not made.outcomes
        return
    (found,) = made.outcomes
    assert found.stage == "rewards"
    if given_:
        assert found.state == "not compared"
        assert "gave the reward functions" in found.detail
    elif played is None:
        assert found.detail == "graded [{'p': 1}]"
    elif state == "not compared":
        assert (found.state, found.detail) == (state, "why")
    elif has_wrong:
        assert found is wrong
    elif has_answers:
        assert found.detail == "graded ['an answer']"
    else:
        assert (found.state, found.detail) == ("equal", "3 rewards given again by game")


@given(
    name=st.sampled_from(["embedded", "sglang"]),
    is_adapter=st.booleans(),
    state=st.sampled_from([None, "equal", "differs", "not compared"]),
)
def test_what_cannot_be_sampled_again(name: str, is_adapter: bool, state: Any) -> None:
    made = again(list(STAGES), _why_rounded="why")
    made.recorded.start.engine = name
    made._config.lora.publishes_adapter = is_adapter
    played = state and PlayedAgain(StageOutcome("episodes", state, ""), requests=["theirs"])  # type: ignore[list-item]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reexecution, "requests_of_groups", lambda recorded: ["of groups"])
        found = made._completions(played)
    assert found.requests == (["theirs"] if state else ["of groups"])
    assert found.why_rounded == "why"
    if name == "sglang":
        assert found.why_not == "sglang sampled them"
    elif is_adapter:
        assert found.why_not == "the engine sampled them with an adapter"
    elif state in (None, "equal"):
        assert not found.why_not
    else:
        assert found.why_not == "their episodes were not played again"


def test_a_damaged_checkpoint_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def made_history(*given: Any, first: int) -> Any:
        calls.append(first)
        return SimpleNamespace(
            origin="step_000002",
            changed_file=lambda: changed,
            load=lambda: calls.append("load"),
        )

    monkeypatch.setattr(reexecution, "WeightHistory", made_history)
    made = again(["rewards"])
    changed = ""
    assert made._loaded(3).origin == "step_000002"
    assert (calls, made.outcomes) == ([3, "load"], [])
    changed = "model.safetensors"
    assert made._loaded(3) is None
    assert calls == [3, "load", 3]
    (found,) = made.outcomes
    assert (found.stage, found.state) == ("weights", "differs")
    assert found.where == "step_000002/model.safetensors"
    assert "trainer_state.json" in found.expected
    assert found.found.startswith("another: ")


def test_recorded_tools_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made = again(list(STAGES))
    monkeypatch.setattr(reexecution, "load_tokenizer", lambda model: "tokenizer")
    monkeypatch.setattr(reexecution, "stop_token_ids", lambda *given: list(given))
    monkeypatch.setattr(reexecution, "play_again", lambda *given: given)
    assert made._played(History(3), {"p": 1}) == (
        made.recorded,
        made._config,
        {"p": 1},
        ["m", "tokenizer"],
    )
    made.recorded_tools = True
    found = made._played(History(3), {"p": 1}).outcome
    assert (found.stage, found.state) == ("episodes", "not compared")


class Trained(WeightHistory):
    """Models of which loading is noted."""


@pytest.mark.parametrize("saved", [None, Path("step_000002")])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_models_come_from_the_checkpoint_or_from_the_start(
    saved: Path | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    newest: list[Any] = []
    policy = SimpleNamespace()

    class Made:
        def __new__(cls, *given: Any) -> Any:
            calls.append(("new", *given))
            return policy

        @staticmethod
        def restore(*given: Any) -> Any:
            calls.append(("restore", *given))
            return policy

    def found(folder: Path, at_most: int) -> Path | None:
        newest.append((folder, at_most))
        return saved

    monkeypatch.setattr(history, "Policy", Made)
    monkeypatch.setattr(history, "Reference", lambda *given: ("reference", *given))
    monkeypatch.setattr(history, "value_function", lambda *given: ("critic", *given))
    monkeypatch.setattr(checkpoint, "newest", found)
    monkeypatch.setattr(checkpoint, "read_state", lambda path: b"state")
    monkeypatch.setattr(checkpoint, "load_state", lambda *given: given)
    monkeypatch.setattr(checkpoint, "changed_file", lambda path: f"a file of {path}")
    config: Any = SimpleNamespace(model=SimpleNamespace(name="tiny"))
    ranks: Any = Ranks(rank)
    record: Any = None
    made: Any = WeightHistory(record, Path("run"), config, ranks, first=3)
    assert newest == [(Path("run/checkpoints"), 3)]
    assert made.origin == ("step_000002" if saved else "the initial model tiny")
    expected = "a file of step_000002" if saved and rank == 0 else ""
    assert made.changed_file() == expected
    made.load()
    assert made.reference == ("reference", policy, saved)
    assert made.critic == ("critic", config, ranks, saved)
    if saved is None:
        assert calls == [("new", config, ranks)]
    else:
        body = b"" if rank else b"state"
        assert calls == [("restore", config, ranks, saved, (body, saved))]


def test_every_setting_that_an_update_reads_must_be_the_same() -> None:
    config = from_mapping({})
    then = config.model_dump(mode="json")
    made: Any = object.__new__(Trained)
    made._config = config
    made.saved = Path("step_000002")
    step = SimpleNamespace(step=3, start=SimpleNamespace(config=then))
    made._check_settings(step)
    read = ["model", "lora", "algorithm", "critic", "sampling", "teacher", "trainer"]
    read += ["optimizer", "parallel"]
    alone = {
        ("", "seed"),
        ("", "reproducible"),
        ("environment", "turn_discount"),
        ("reward", "functions"),
    }
    for section, content in then.items():
        values = content if isinstance(content, dict) else {"": content}
        for name in list(values):
            target = content if isinstance(content, dict) else then
            place = (section, name) if isinstance(content, dict) else ("", section)
            key = place[1]
            known = target[key]
            target[key] = "another"
            is_read = place in alone or (
                section in read and not (section == "trainer" and name in UNREAD_OF_TRAINER)
            )
            if is_read:
                with raises(ConfigError, field="checkpoint.keep", value="step_000002") as caught:
                    made._check_settings(step)
                called = ".".join(filter(None, place))
                assert f"step 3 was made with {called} another, " in str(caught.value)
                assert f"the re-executed step with {known}, and" in str(caught.value)
            else:
                made._check_settings(step)
            target[key] = known


_SETUPS = st.builds(
    Setup,
    packages=st.dictionaries(st.sampled_from(["torch", "numpy"]), st.sampled_from(["1", "2"])),
    world_size=st.integers(1, 2),
    threads=st.integers(1, 2),
    device=st.sampled_from(["cpu", "a GPU"]),
    instructions=st.sampled_from(["avx2", "avx512"]),
)


@given(_SETUPS, _SETUPS)
def test_every_difference_of_two_machines_is_told(then: Setup, now: Setup) -> None:
    expected = []
    if then.device != now.device:
        expected.append(f"the run computed on {then.device}, this is {now.device}")
    if then.instructions != now.instructions:
        expected.append(f"the run's processor had {then.instructions}, this has {now.instructions}")
    if then.world_size != now.world_size:
        expected.append(f"the run had {then.world_size} ranks, this has {now.world_size}")
    if then.threads != now.threads:
        expected.append(f"the run's ranks had {then.threads} threads, these have {now.threads}")
    for name in ("numpy", "torch"):
        was = then.packages.get(name)
        is_now = now.packages.get(name, "none")
        if was is not None and was != is_now:
            expected.append(f"{name} was {was} and is {is_now}")
    assert differences(then, now) == expected


_NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.25, float("nan")])
_COLUMN = st.none() | st.lists(_NUMBERS, max_size=3)


@given(st.lists(st.tuples(_COLUMN, _COLUMN), max_size=4), st.sampled_from([0.0, 0.25, 0.2]))
def test_the_first_number_of_a_column_that_differs(rows: list[Any], bound: float) -> None:
    expected, found = (
        [None if row[side] is None else np.array(row[side], np.float32) for row in rows]
        for side in (0, 1)
    )
    names = [f"row {number}" for number in range(len(rows))]
    made = compare_columns("logprobs", "numbers", expected, found, names=names, bound=bound)
    count = 0
    largest = 0.0
    for name, (was, is_now) in zip(names, rows, strict=True):
        if was is None or is_now is None:
            continue
        if len(was) != len(is_now):
            assert (made.state, made.where) == ("differs", f"{name}: number of tokens")
            assert (made.expected, made.found) == (str(len(was)), str(len(is_now)))
            return
        for token, (one, other) in enumerate(zip(was, is_now, strict=True)):
            is_equal = repr(one) == repr(other)  # which tells 0.0 from -0.0, and knows NaN
            is_close = bool(bound) and abs(one - other) <= bound
            if not is_equal and not is_close:
                assert (made.state, made.where) == ("differs", f"{name}, trained token {token}")
                assert (made.expected, made.found) == (f"{one:.9g}", f"{other:.9g}")
                assert made.detail == "numbers"
                return
            largest = max(largest, abs(one - other))
        count += len(was)
    if bound:
        assert made.state == "close"
        if not any("nan" in repr(row) for row in rows):
            assert made.detail == f"{count} numbers, at most {largest:.2g} apart (bound {bound:g})"
    else:
        assert (made.state, made.detail) == ("equal", f"{count} numbers")


def test_checksums() -> None:
    equal = compare_checksums("weights", "version 3", "a", "a")
    assert equal == StageOutcome("weights", "equal", "version 3 a")
    other = compare_checksums("weights", "version 3", "a", None)
    assert other == StageOutcome("weights", "differs", "version 3", "version 3", "a", "None")


def test_groups_that_are_not_those_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    line = SimpleNamespace(groups=["a", "b"], step=3)
    record: Any = SimpleNamespace(step=lambda step: line, start=lambda line: "start")
    groups: list[Any] = []
    monkeypatch.setattr(recorded, "read_trained", lambda run_dir, step: groups)

    def item(name: str, reused: bool = False, rows: int = 1) -> Any:
        completions = [f"{name}{number}" for number in range(rows)]
        group = SimpleNamespace(id=name, completions=completions)
        return SimpleNamespace(group=group, reused=reused)

    for ids, value in ((["a", "c"], "c"), (["a"], "1 groups instead of 2"), (["a", "b", "c"], "c")):
        groups = [item(name) for name in ids]
        with raises(ConfigError, field="groups/step_000003.zip", value=value):
            recorded.RecordedStep.read(Path("run"), record, 3)
    groups = [item("a", reused=True, rows=2), item("b")]
    found: Any = recorded.RecordedStep.read(Path("run"), record, 3)
    assert (found.step, found.start) == (3, "start")
    assert [group.id for group in found.fresh] == ["b"]
    assert found.completions == ["a0", "a1", "b0"]
    assert found.names == [
        "group 0 (a), completion 0",
        "group 0 (a), completion 1",
        "group 1 (b), completion 0",
    ]


def test_the_batch_of_a_step_is_that_before_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    items: Any = [
        SimpleNamespace(group="a", weight=0.5, reused=True),
        SimpleNamespace(group="b", weight=1.0, reused=False),
    ]
    line: Any = SimpleNamespace(step=3)
    start: Any = None
    monkeypatch.setattr(Batch, "of", lambda *given: given)
    found: Any = recorded.RecordedStep(line, start, items).batch(from_mapping({}))
    groups, config, version = found
    assert [(each.group, each.weight, each.reused) for each in groups] == [
        ("a", 0.5, True),
        ("b", 1.0, False),
    ]
    assert (config, version) == (from_mapping({}), 2)


@pytest.mark.parametrize("given_", [[], ["rewards"], ["prompts"]])
@pytest.mark.parametrize("device", ["cpu", "a GPU"])
def test_the_settings_of_an_attempt(given_: list[str], device: str) -> None:
    content = from_mapping({"seed": 5}).model_dump(mode="json")
    names = ["brief", {"name": "right", "weight": 2.0}]
    if "rewards" in given_:
        content["reward"]["functions"] = names
    content["trainer"]["run_dir"] = "elsewhere"
    setup = SimpleNamespace(device=device, packages={"rlhf-math": "0.0.1"})
    start: Any = SimpleNamespace(setup=setup, config=content, given=given_)
    found = recorded.config_of(start, Path("run"))
    assert found.trainer.run_dir == Path("run")
    assert found.trainer.device == ("cpu" if device == "cpu" else "auto")
    assert recorded.config_of(start, Path("run"), "cpu").trainer.device == "cpu"
    assert found.seed == 5
    weights = {"brief": 1.0, "right": 2.0} if "rewards" in given_ else {"math": 1.0}
    assert found.reward.weights == weights
    assert content["trainer"]["run_dir"] == "elsewhere", "the record stays as it was"
    content["optimizer"]["learning_rate"] = "high"
    with raises(ConfigError, field="optimizer.learning_rate", value="high") as caught:
        recorded.config_of(start, Path("run"))
    assert "rlhf-math 0.0.1" in str(caught.value)


def test_what_a_command_is_at_is_told_by_a_thread_that_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(waits, "_SAY_EVERY_S", 0.001)
    told = threading.Event()
    before = set(threading.enumerate())
    place = ["loading"]

    def at() -> list[str]:
        told.set()
        return place

    monkeypatch.setattr(watchdog, "place", at)
    with waits.waits_told():
        (thread,) = set(threading.enumerate()) - before
        assert thread.daemon, "it keeps no process alive"
        assert told.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    assert "s: loading\n" in capsys.readouterr().err


class Model:
    """Stands for the engine's model: the most likely token is the number of those before it."""

    tokenizer = None

    def __init__(self, near: list[int]) -> None:
        self.near = near
        self.inputs: Any = None

    def prefill(self, prompts: list[list[int]], rows: list[int], first: int) -> Any:
        self.prompts = prompts
        assert (rows, first) == ([0, 0, 0], 0)
        return "logits"

    def sample(self, logits: Any, inputs: Any) -> Any:
        self.inputs = inputs
        return [np.array(self.near, np.float64)]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("top_k", [-1, 5])
def test_a_token_near_the_edge_of_its_draw(
    count: int, least: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SimpleNamespace(
        temperature=0.7,
        top_p=0.9,
        top_k=top_k,
        min_p=0.1,
        min_new_tokens=least,
        stop_token_ids=[8, 9],
    )
    job = SimpleNamespace(sampling=sampling, sequences=[SimpleNamespace(key=11)])
    drawn: list[Any] = []

    def uniforms(keys: Any, counts: Any) -> Any:
        drawn.append((keys.tolist(), counts.tolist()))
        return np.array([0.5])

    monkeypatch.setattr(engine, "uniforms", uniforms)
    monkeypatch.setattr(engine, "Inputs", lambda rows, plain: (rows, plain))
    made: Any = object.__new__(engine.AuditEngine)
    made._job = lambda span: job
    request = engine.Request(row=0, prompt=[1, 2], seed=3, start=0, end=9)
    span = engine.Span(
        request=request,
        earlier=[5] * count,
        tokens=[6, 7],
        logprobs=np.zeros(2, np.float32),
    )
    for near, could in (([4, 7, 4], True), ([4, 4, 7], True), ([4, 4, 6], False)):
        made._model = Model(near)
        assert made.could_sample(span, 1) == could
        assert made._model.prompts == [[1, 2, *[5] * count, 6]]
        rows, plain = made._model.inputs
        assert not plain
        fields = dict(zip(FIELDS, rows.tolist(), strict=False))
        assert fields["temperature"] == [0.7] * 3
        assert fields["top_p"] == [0.9] * 3
        assert fields["min_p"] == [0.1] * 3
        assert fields["top_k"] == [np.inf if top_k < 0 else 5] * 3
        assert fields["uniform"] == [0.5 - engine.TIE, 0.5, 0.5 + engine.TIE]
        # Where an answer may not end yet, no draw gives one of its ends.
        ends = rows.tolist()[len(FIELDS) :]
        assert ends == ([[8.0] * 3, [9.0] * 3] if count + 1 < least else [])
    assert drawn == [([11], [count + 1])] * 3
