"""The prompts that a curriculum draws: hand-calculated chances, and streams that survive kills,
seeks and repeats."""

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, Conflict, InvalidInput
from common.process import logs
from common.process.storage import StorageFailed
from common.wire.schemas import Prompt
from services.data.curriculum import (
    CurriculumStats,
    Difficulty,
    chances,
    pick,
    uniform,
    weight_of_pass_rate,
)
from services.data.stream import PromptStream
from tests.support.errors import raises

SIZE = 12
GOLDEN = [0.9453165290142962, 0.5891776823904694, 0.687871251503304]
NAN = math.nan
RATES = st.lists(st.one_of(st.just(NAN), st.floats(0, 1)), min_size=1, max_size=30)


def prompts(count: int = SIZE) -> list[Prompt]:
    return [Prompt(id=f"p{n}", prompt=f"problem {n}", ground_truth=str(n)) for n in range(count)]


def stream(
    state: Path, seed: int = 0, size: int = SIZE, difficulty: Difficulty | None = None
) -> PromptStream:
    return PromptStream(prompts(size), seed, state, difficulty or Difficulty(free_share=0.25))


def ids(source: PromptStream, count: int, request_id: str | None = None) -> list[str]:
    return [prompt.id for prompt in source.take(count, request_id=request_id).prompts]


def known(source: PromptStream) -> CurriculumStats:
    stats = source.stats().curriculum
    assert stats is not None
    return stats


def rate(prompt_id: str) -> float:
    """Returns the fixed pass rate of a prompt: p0 is never solved, p4 half of the time, p8
    always."""
    return min(1.0, int(prompt_id[1:]) / 8)


def steps(source: PromptStream, first: int, last: int, size: int = 4) -> list[list[str]]:
    """Acts like a trainer: draws a batch, then reports its pass rates."""
    batches = []
    for step in range(first, last):
        batch = ids(source, size, f"draw-{step}")
        source.report([(name, rate(name)) for name in batch], f"report-{step}")
        batches.append(batch)
    return batches


# ---------------------------------------------------------------- chances


def test_weight_of_pass_rate_by_hand() -> None:
    rates = np.array([0, 0.25, 0.5, 0.75, 1, NAN])
    assert weight_of_pass_rate(rates, 0.5).tolist() == [0, 0.75, 1, 0.75, 0, 0]
    # Target 0.25: (4p)^0.5 · (4/3 · (1 − p))^1.5; at p = 0.5 that is 2^0.5 · (2/3)^1.5.
    assert weight_of_pass_rate(rates, 0.25)[[0, 1, 2, 4]] == pytest.approx(
        [0, 1, math.sqrt(2) * (2 / 3) ** 1.5, 0]
    )


def test_chances_by_hand() -> None:
    weights = weight_of_pass_rate(np.array([0.25, 0.5, NAN, 1]), 0.5)  # 0.75, 1, 0, 0
    assert chances(weights, 0.3) == pytest.approx([0.3, 0.4, 0, 0])
    assert chances(np.zeros(3), 0.3).tolist() == [0, 0, 0]
    assert chances(np.ones(2), 1.0).tolist() == [0, 0]


def test_picks_by_hand() -> None:
    chance = np.array([0.25, 0, 0.5, 0])
    numbers = [0, 0.2, 0.25, 0.5, 0.74, 0.75, 0.99]
    assert [pick(chance, number) for number in numbers] == [0, 0, 2, 2, 2, None, None]


@given(RATES, st.floats(0.05, 0.95), st.floats(0.01, 1))
def test_chances_are_chances(rates: list[float], target: float, free_share: float) -> None:
    weights = weight_of_pass_rate(np.array(rates), target)
    assert (weights >= 0).all()
    assert (weights <= 1 + 1e-9).all()
    assert (weights[[math.isnan(p) or p in (0, 1) for p in rates]] == 0).all()
    chance = chances(weights, free_share)
    assert (chance >= 0).all()
    assert chance.sum() == pytest.approx(1 - free_share if weights.any() else 0, abs=1e-9)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 0.95))
def test_nearer_to_the_target_on_the_same_side_is_never_wanted_less(
    one: float, other: float, target: float
) -> None:
    low, high = sorted((one, other))
    for side in (np.array([high, low]) * target, 1 - np.array([high, low]) * (1 - target)):
        near, far = weight_of_pass_rate(side, target)
        assert near >= far * (1 - 1e-9)


@given(RATES, st.floats(0, 1, exclude_max=True), st.floats(0.01, 1))
def test_a_pick_is_a_prompt_with_a_chance(
    rates: list[float], number: float, free_share: float
) -> None:
    chance = chances(weight_of_pass_rate(np.array(rates), 0.5), free_share)
    place = pick(chance, number)
    assert place is None or chance[place] > 0


def test_picks_come_as_often_as_their_chances() -> None:
    chance = np.array([0.1, 0.4, 0, 0.2])
    picked = Counter(pick(chance, uniform(0, position)) for position in range(20_000))
    for place, expected in {0: 0.1, 1: 0.4, 3: 0.2, None: 0.3}.items():
        assert picked[place] / 20_000 == pytest.approx(expected, abs=0.015)
    assert picked[2] == 0


def test_the_random_numbers_never_change_between_versions() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 2**40)] == GOLDEN


# ---------------------------------------------------------------- the stream


def test_the_first_pass_is_the_plain_stream_and_has_every_prompt(tmp_path: Path) -> None:
    plain = PromptStream(prompts(), 0, tmp_path / "plain")
    assert ids(stream(tmp_path / "drawn"), SIZE) == ids(plain, SIZE)


def test_without_reports_it_stays_the_plain_stream(tmp_path: Path) -> None:
    plain = PromptStream(prompts(), 0, tmp_path / "plain")
    assert ids(stream(tmp_path / "drawn"), 100) == ids(plain, 100)


def test_the_draws_do_not_depend_on_how_they_are_cut_into_batches(tmp_path: Path) -> None:
    together, apart = stream(tmp_path / "a"), stream(tmp_path / "b")
    for source in (together, apart):
        steps(source, 0, 6)
    assert ids(together, 9) == [name for _ in range(9) for name in ids(apart, 1)]


def test_medium_prompts_come_more_often_and_all_keep_coming(tmp_path: Path) -> None:
    source = stream(tmp_path)
    drawn = Counter(name for batch in steps(source, 0, 150) for name in batch)
    assert set(drawn) == {f"p{n}" for n in range(SIZE)}
    assert min(drawn["p3"], drawn["p4"], drawn["p5"]) > 3 * max(
        drawn["p0"], drawn["p8"], drawn["p11"]
    )
    assert drawn["p0"] >= 600 * 0.25 // SIZE  # its share of the free draws
    now = known(source)
    assert (now.known, now.drawn_freely + now.drawn_by_difficulty) == (SIZE, 600)
    assert now.mean_pass_rate == pytest.approx(sum(rate(f"p{n}") for n in range(SIZE)) / SIZE)


def test_drawn_prompt_waits_for_its_pass_rate_but_not_for_ever(tmp_path: Path) -> None:
    source = stream(tmp_path, difficulty=Difficulty(free_share=1e-9))
    first = ids(source, SIZE)
    source.report([(name, 0.5) for name in first[:3]], "three")
    drawn = ids(source, 3)
    assert set(drawn) == set(first[:3])  # once each, although each has a chance of a third
    assert known(source).drawn_by_difficulty == 3
    ids(source, SIZE - 3)  # nothing is left to draw by difficulty, so the plain stream continues
    assert known(source).drawn_freely == SIZE + SIZE - 3
    ids(source, 2 * SIZE)  # their groups may have been dropped, so they return
    assert known(source).drawn_by_difficulty > 3


def test_pass_rates_are_smoothed(tmp_path: Path) -> None:
    source = stream(tmp_path, difficulty=Difficulty(smoothing=0.75))
    for number, value in enumerate((1.0, 0.0, 1.0, 1.0)):
        source.report([("p3", value)], f"r{number}")
    now = known(source)
    assert (now.known, now.mean_pass_rate) == (
        1,
        1 - 0.25 * 0.75**2,
    )  # the weight of the failed attempt


def test_a_repeated_report_counts_once(tmp_path: Path) -> None:
    source = stream(tmp_path)
    for value in (1.0, 0.0):
        for _ in range(3):
            source.report([("p3", value)], f"of {value}")
    assert known(source).mean_pass_rate == 0.5
    with raises(InvalidInput, field="request_id"):
        source.report([("p3", 0.25)], "of 1.0")
    with raises(InvalidInput, field="prompt_ids", value="p99"):
        source.report([("p3", 0.25), ("p99", 1.0)], "new")
    assert known(source).known == 1


def test_late_calls_of_a_run_that_has_ended_change_nothing(tmp_path: Path) -> None:
    source = stream(tmp_path)
    for run in ("run-1", "run-2"):
        with logs.request("start", run):
            source.seek(0, f"{run}-start", replaces=source.stats().run)
            steps(source, 0, 2)
    before = source.stats()
    late: list[Callable[[], object]] = [
        lambda: source.take(4, request_id="draw-9"),
        lambda: source.take(4, request_id="draw-1"),
        lambda: source.report([("p0", 1.0)], "report-9"),
        lambda: source.seek(0, "run-1-start"),
        lambda: source.seek(0, "run-1-back"),
    ]
    for call in late:
        with (
            logs.request("late", "run-1"),
            raises(Conflict, code="superseded", value="run-1"),
        ):
            call()
    assert source.stats() == before


def test_draws_and_pass_rates_survive_a_restart(tmp_path: Path) -> None:
    whole = steps(stream(tmp_path / "whole"), 0, 30)
    cut = [
        steps(stream(tmp_path / "cut"), n, n + 5) for n in range(0, 30, 5)
    ]  # never closed, as after a kill
    assert [batch for part in cut for batch in part] == whole
    again = stream(tmp_path / "cut")
    assert ids(again, 4, "draw-29") == whole[29]
    assert again.stats().position == 120


def test_several_processes_on_one_state_draw_one_stream(tmp_path: Path) -> None:
    whole = steps(stream(tmp_path / "whole"), 0, 30)
    pair = [stream(tmp_path / "shared") for _ in range(2)]
    batches = [steps(pair[n % 2], n, n + 1)[0] for n in range(20)]
    pair[0].seek(40)
    batches[10:] = [steps(pair[(n + 1) % 2], n, n + 1)[0] for n in range(10, 30)]
    assert batches == whole


@pytest.mark.parametrize("back", [0, 2, 9, 14])
def test_seek_goes_back_to_what_was_known_there(tmp_path: Path, back: int) -> None:
    """A trainer resuming from a step's checkpoint gets the same prompts after that step as an
    unbroken run."""
    whole = steps(stream(tmp_path / "whole"), 0, 25)
    source = stream(tmp_path / "broken")
    assert steps(source, 0, 15) == whole[:15]
    ids(source, 4)  # drawn for a step that never finished
    source.seek(4 * back)
    assert source.stats().position == 4 * back
    for step in range(back, 25):
        batch = ids(source, 4, f"resumed-{step}")
        source.report([(name, rate(name)) for name in batch], f"resumed-report-{step}")
        assert batch == whole[step]
    if back:
        assert (
            ids(source, 4, f"draw-{back - 1}") == whole[back - 1]
        )  # a late retry still gets its batch


def test_seek_forward_leaves_a_gap_and_goes_on(tmp_path: Path) -> None:
    source = stream(tmp_path)
    steps(source, 0, 5)
    source.seek(1000)
    assert source.take(4).position == 1000
    source.seek(500)
    assert source.take(4).position == 500
    assert known(source).drawn_freely >= SIZE


def test_reset_forgets_everything(tmp_path: Path) -> None:
    source = stream(tmp_path)
    first = steps(source, 0, 20)
    source.reset()
    assert known(source).known == 0
    assert steps(source, 0, 20) == first


def test_failed_write_changes_nothing(tmp_path: Path) -> None:
    whole = steps(stream(tmp_path / "whole"), 0, 12)
    source = stream(tmp_path / "full")
    assert steps(source, 0, 8) == whole[:8]
    source.db.execute("PRAGMA query_only = ON")  # like a disk that refuses writes
    with pytest.raises(StorageFailed):
        source.take(4)
    with pytest.raises(StorageFailed):
        source.report([("p3", 0.1)], "lost")
    source.db.execute("PRAGMA query_only = OFF")
    assert steps(source, 8, 12) == whole[8:]


def test_a_plain_stream_takes_no_pass_rates_and_is_another_one(tmp_path: Path) -> None:
    plain = PromptStream(prompts(), 0, tmp_path / "plain")
    with raises(InvalidInput, field="data.curriculum"):
        plain.report([("p3", 0.5)], "r")
    with raises(ConfigError, field="state_dir"):
        stream(tmp_path / "plain")
    stream(tmp_path / "drawn").close()
    with raises(ConfigError, field="state_dir"):
        PromptStream(prompts(), 0, tmp_path / "drawn")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "report", "seek", "restart"]), st.integers(0, 30)),
        max_size=25,
    )
)
def test_every_position_has_one_prompt_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int]]
) -> None:
    """Positions are handed out in order without gaps or repeats, and a repeated request gets what
    it got."""
    state = tmp_path_factory.mktemp("state")
    source, chance = stream(state), random.Random(1)
    source.db.execute("PRAGMA synchronous = OFF")  # only for speed
    handed: dict[int, str] = {}
    position = 0
    for number, (call, argument) in enumerate(calls):
        if call == "take":
            taken = source.take(argument + 1, request_id=f"t{number}")
            assert taken.position == position
            assert source.take(argument + 1, request_id=f"t{number}") == taken
            handed |= {position + offset: prompt.id for offset, prompt in enumerate(taken.prompts)}
            position += argument + 1
        elif call == "report":
            source.report([(f"p{argument % SIZE}", chance.random())], f"r{number}")
        elif call == "seek":
            position = min(position, argument)
            source.seek(position)
            handed = {at: name for at, name in handed.items() if at < position}
        else:
            source.close()
            source = stream(state)
        assert source.stats().position == position
    stored = source.db.execute("SELECT position, place FROM draws ORDER BY position").fetchall()
    assert {at: f"p{place}" for at, place in stored} == handed
    assert sorted(handed) == list(range(position))
    source.close()
