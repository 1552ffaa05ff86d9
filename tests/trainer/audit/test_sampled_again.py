"""Which answers count as sampled again, against a model of an engine whose draws are known.

The engine takes another token than the run at given places; some of these are ties, which rounding
decides.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clients.rollout import sample_seed
from common.wire.schemas import Completion
from trainer.audit import completions as module
from trainer.audit.comparison import StageOutcome
from trainer.audit.completions import Completions, requests_of_groups, sampling_versions
from trainer.audit.engine import Request, SampledAnswer, Span

OTHER = 1000
"""What the engine's token is above the recorded one where it takes another."""
WAYS = ("same", "rounded", "tie", "other", "end")


def replay(**fields: Any) -> Completions:
    known: dict[str, Any] = {
        "recorded": SimpleNamespace(names=[f"row {n}" for n in range(9)]),
        "config": SimpleNamespace(reproducible=False),
        "ranks": None,
        "requests": [],
        "why_not": "",
        "why_rounded": "",
    }
    return Completions(**known | fields)


class Engine:
    """Samples what `ways` says for every token of every row."""

    def __init__(self, ways: list[list[str]]) -> None:
        self.ways = ways

    def sample(self, spans: list[Span]) -> list[SampledAnswer]:
        found = []
        for span in spans:
            tokens: list[int] = []
            logprobs: list[float] = []
            for at, token in enumerate(span.tokens):
                way = self.ways[span.request.row][span.start + at]
                if way == "end":
                    break
                is_other = way in ("tie", "other")
                tokens.append(token + OTHER if is_other else token)
                logprobs.append(float(span.logprobs[at]) + (0.5 if way == "rounded" else 0.0))
            found.append(SampledAnswer(tokens, np.array(logprobs, np.float32)))
        return found

    def could_sample(self, span: Span, at: int) -> bool:
        return self.ways[span.request.row][span.start + at] == "tie"


_WAYS = st.lists(st.sampled_from((*WAYS, "same", "tie")), min_size=1, max_size=5)


@given(st.lists(_WAYS, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_what_came_out_again(
    ways: list[list[str]], reproducible: bool, is_other_machine: bool
) -> None:
    spans = [
        Span(
            request=Request(row=row, prompt=[1], seed=row, start=0, end=len(of_row)),
            earlier=[],
            tokens=[10 * row + at for at in range(len(of_row))],
            logprobs=-np.arange(1, len(of_row) + 1, dtype=np.float32),
        )
        for row, of_row in enumerate(ways)
    ]
    why = "another machine" if is_other_machine else ""
    again = replay(config=SimpleNamespace(reproducible=reproducible), why_rounded=why)
    engine: Any = Engine(ways)
    again._sample(engine, spans)

    is_exact = reproducible and not is_other_machine
    counted = 0
    ties = 0
    rounded = 0
    wrong: list[tuple[int, int, int]] = []
    for row, of_row in enumerate(ways):
        pieces = [list(enumerate(of_row))]
        if not is_exact:
            # The first tie before anything else that differs divides an answer.
            pieces = []
            piece: list[tuple[int, str]] = []
            is_over = False
            for at, way in enumerate(of_row):
                if way == "tie" and not is_over:
                    ties += 1
                    pieces.append(piece)
                    piece = []
                    continue
                is_over = is_over or way in ("other", "end")
                piece.append((at, way))
            pieces.append(piece)
        for number, part in enumerate(pieces):
            counted += len(part)
            differs = [at for at, way in part if way in ("tie", "other", "end")]
            moved = [at for at, way in part if way == "rounded"]
            if differs:
                wrong.append((number, row, differs[0]))
            elif moved:
                rounded += len(part)
                if is_exact:
                    wrong.append((number, row, moved[0]))
    assert (again._tokens, again._ties, again._rounded) == (counted, ties, rounded)
    difference = again._difference
    if not wrong:
        assert difference is None
        return
    assert difference is not None
    _, row, at = min(wrong)
    assert (difference.stage, difference.state) == ("completions", "differs")
    assert difference.where == f"row {row}, token {at}"
    assert difference.expected == f"token {10 * row + at}, log-probability {float(-at - 1):.9g}"
    way = ways[row][at]
    if way == "end":
        assert difference.found.startswith("the end, after ")
    else:
        moved_by = 0.5 if way == "rounded" else 0.0
        token = 10 * row + at + (0 if way == "rounded" else OTHER)
        assert difference.found == f"token {token}, log-probability {moved_by - at - 1:.9g}"


def test_an_answer_that_goes_on_differs_after_its_last_token() -> None:
    request = Request(row=0, prompt=[1], seed=1, start=0, end=2)
    span = Span(request=request, earlier=[], tokens=[5, 6], logprobs=np.zeros(2, np.float32))
    longer = SampledAnswer([5, 6, 7], np.zeros(3, np.float32))
    engine: Any = SimpleNamespace(sample=lambda spans: [longer], could_sample=lambda *_: True)
    again = replay()
    again._sample(engine, [span])
    assert again._difference is not None
    assert again._difference.where == "row 0, token 2"
    assert again._difference.expected == "the end, after 2 tokens"
    rest = replace(span, earlier=[4]).after(1)
    assert (rest.earlier, rest.tokens, rest.start) == ([4, 5], [6], 2)


def test_zero_has_a_sign_where_bits_are_compared() -> None:
    request = Request(row=0, prompt=[1], seed=1, start=0, end=2)
    recorded = np.array([-1.0, 0.0], np.float32)
    span = Span(request=request, earlier=[], tokens=[5, 6], logprobs=recorded)
    sampled = SampledAnswer([5, 6], np.array([-1.0, -0.0], np.float32))
    again = replay(config=SimpleNamespace(reproducible=True))
    again._compare(span, sampled)
    assert again._difference is not None
    assert again._difference.where == "row 0, token 1"
    assert again._difference.found == "token 6, log-probability -0"


_GROUPS = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
"""Whether a group is reused, and of each of its completions the versions."""


def recorded_groups(groups: list[tuple[bool, list[list[int]]]]) -> Any:
    items = []
    for number, (reused, rows) in enumerate(groups):
        completions = [
            SimpleNamespace(
                token_ids=np.arange(len(versions)),
                weight_versions=[(version, at, at + 1) for at, version in enumerate(versions)],
            )
            for versions in rows
        ]
        group = SimpleNamespace(prompt_token_ids=np.array([number, 7]), completions=completions)
        items.append(SimpleNamespace(group=group, reused=reused))
    return SimpleNamespace(
        groups=items,
        fresh=[item.group for item in items if not item.reused],
        line=SimpleNamespace(seeds=[100 + number for number in range(len(items))]),
    )


@given(_GROUPS)
def test_only_fresh_groups_are_sampled_again(groups: list[tuple[bool, list[list[int]]]]) -> None:
    recorded = recorded_groups(groups)
    expected = []
    versions = set()
    row = 0
    for number, (reused, rows) in enumerate(groups):
        for index, of_row in enumerate(rows):
            if not reused:
                versions |= set(of_row)
                expected.append(
                    Request(
                        row=row,
                        prompt=[number, 7],
                        seed=sample_seed(100 + number, index),
                        start=0,
                        end=len(of_row),
                    )
                )
            row += 1
    assert requests_of_groups(recorded) == expected
    assert sampling_versions(recorded) == sorted(versions)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=4))
def test_two_answers_to_one_prompt_have_two_seeds(drawn: list[tuple[int, int]]) -> None:
    requests = [
        Request(row=row, prompt=[prompt], seed=seed, start=0, end=1)
        for row, (seed, prompt) in enumerate(drawn)
    ]
    # Two requests of one completion may be equal: its second begins with other tokens.
    requests += requests[:1]
    found = replay(requests=requests)._equal_seeds()
    repeated = [row for row, each in enumerate(drawn) if each in drawn[:row]]
    if not repeated:
        assert found is None
        return
    row = repeated[0]
    assert found is not None
    assert (found.stage, found.state, found.where) == ("completions", "differs", f"row {row}")
    assert found.expected == f"another seed than row {drawn.index(drawn[row])}"
    assert found.found == str(drawn[row][0])


_MACHINES = list(itertools.product(("cpu", "a GPU"), ("embedded", "sglang"), (False, True)))


@pytest.mark.parametrize(("device", "engine", "low"), _MACHINES)
@pytest.mark.parametrize("apart", [5e-4, 5e-3, 1.0])
def test_every_sampled_token_is_scored_by_its_version(
    device: str, engine: str, low: bool, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first completion is of two versions, the second of one that has no scores, the third has
    tokens of a tool."""
    monkeypatch.setattr(module, "computes_in_bfloat16", lambda model, ranks: low)
    logprobs = -np.arange(1, 5, dtype=np.float32)

    def completion(spans: list[tuple[int, int, int]], mask: Any = None) -> Completion:
        tokens = np.arange(4, dtype=np.int32)
        return Completion(
            token_ids=tokens,
            logprobs=logprobs,
            text="",
            finish_reason="stop",
            weight_versions=spans,
            mask=mask,
        )

    mask = np.array([1, 0, 1, 1], np.int32)
    rows = [
        completion([(3, 0, 1), (4, 1, 4)]),
        completion([(2, 0, 2), (4, 2, 4)]),
        completion([(4, 0, 4)], mask),
    ]
    setup = SimpleNamespace(device=device)
    again = replay(
        recorded=SimpleNamespace(
            completions=rows,
            names=["first", "second", "third"],
            start=SimpleNamespace(setup=setup, engine=engine),
        ),
        config=SimpleNamespace(model="model", reproducible=False),
    )
    nothing = np.full(4, 99, np.float32)
    third = logprobs[[0, 2, 3]] + np.array([0, 0, apart], np.float32)
    again._scores = {
        3: [np.array([-1, 99, 99, 99], np.float32), nothing, nothing[:3]],
        4: [np.array([99, *logprobs[1:]], np.float32), nothing, third],
    }
    found = again._scored()
    is_low = low or device != "cpu" or engine != "embedded"
    if apart <= (0.5 if is_low else 1e-3):
        assert found.state == "close"
        assert found.detail.startswith("7 sampled tokens")
    else:
        assert (found.state, found.where) == ("differs", "third, trained token 2")
        assert (found.expected, found.found) == ("-4", f"{float(third[2]):.9g}")


@given(
    tokens=st.integers(0, 9),
    ties=st.integers(0, 2),
    rounded=st.integers(0, 2),
    reused=st.integers(0, 1),
    reproducible=st.booleans(),
    why_not=st.sampled_from(["", "sglang sampled them"]),
    scored=st.sampled_from(["close", "differs"]),
    has_difference=st.booleans(),
    has_seeds=st.booleans(),
)
def test_the_outcome_says_the_worst(
    tokens: int,
    ties: int,
    rounded: int,
    reused: int,
    reproducible: bool,
    why_not: str,
    scored: str,
    has_difference: bool,
    has_seeds: bool,
) -> None:
    recorded = SimpleNamespace(
        names=["row 0", "row 1"],
        groups=[SimpleNamespace(reused=bool(number < reused)) for number in range(2)],
    )
    requests = [Request(row=row, prompt=[1], seed=5, start=0, end=1) for row in range(2)]
    again: Any = replay(
        recorded=recorded,
        requests=requests if has_seeds else requests[:1],
        config=SimpleNamespace(reproducible=reproducible),
        why_not=why_not,
        why_rounded="of torch",
    )
    again._tokens = tokens
    again._ties = ties
    again._rounded = rounded
    difference = StageOutcome("completions", "differs", "a difference")
    score: Any = SimpleNamespace(state=scored, detail="scores")
    again._difference = difference if has_difference else None
    again._scored = lambda: score
    found = again.outcome()
    if has_seeds:
        assert found.detail == "two answers to one prompt have one seed"
    elif has_difference:
        assert found is difference
    elif scored == "differs":
        assert found is score
    elif why_not:
        assert found.state == "close"
        assert found.detail == "not sampled again, because sglang sampled them; scores"
    else:
        says = f"{tokens + ties} tokens of 1 answers sampled again"
        if reused:
            says += " (1 reused groups belong to earlier steps)"
        assert found.detail.startswith(says)
        assert found.state == ("close" if ties or rounded else "equal")
        rest = found.detail.removeprefix(says)
        if found.state == "equal":
            assert not rest
        else:
            assert (f" except {ties} " in rest) == bool(ties)
            assert f"of {rounded} differ" in rest
            assert ("because of torch" in rest) == reproducible
            assert rest.endswith("(scores)")
