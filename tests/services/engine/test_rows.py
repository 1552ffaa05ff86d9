"""The state of the running rows of the embedded engine after random additions, steps and removals,
compared with lists."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.rows import Rows
from services.engine.sampling import FIELDS, uniforms

CAPACITY = 6


@dataclass
class Line:
    """What a row holds."""

    sequence: Sequence
    length: int
    """Tokens of which keys and values are stored; the next one is at this place."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[tuple[float, list[int]]] = field(default_factory=list)


def _line(rng: np.random.Generator) -> Line:
    """Returns a completion that begins, or that goes on after a pause."""
    limit = int(rng.choice([3, 40, 150]))
    kept = bool(rng.random() < 0.4)
    params = SamplingParams(
        max_new_tokens=limit,
        min_new_tokens=int(rng.integers(0, limit)),
        temperature=float(rng.choice([0.0, 0.5, 2.0])),
        top_p=float(rng.choice([0.7, 1.0])),
        top_k=int(rng.integers(1, 5)) if kept else -1,
        min_p=float(rng.choice([0.0, 0.25])),
        stop_token_ids=rng.integers(0, 40, rng.integers(0, 4)).tolist(),
        stop=["text"] if rng.random() < 0.3 else [],
    )
    job = GenerationJob("r", [5] * int(rng.integers(1, 9)), params, returns_kept=kept)
    job.returns_experts = bool(rng.random() < 0.3)
    job.start(int(rng.integers(1 << 40)))
    (sequence,) = job.sequences
    count = int(rng.integers(0, limit)) if rng.random() < 0.4 else 0
    sequence.tokens = rng.integers(0, 40, count).tolist()
    sequence.logprobs = rng.normal(size=count).astype(np.float32).tolist()
    return Line(sequence, len(job.prompt) + count, list(sequence.tokens), list(sequence.logprobs))


def _step(rng: np.random.Generator, rows: Rows, lines: list[Line], first: int) -> None:
    """Samples a token for the lines from `first` on."""
    new = lines[first:]
    sampled = np.zeros((8, len(new)))
    for column, line in enumerate(new):
        logprob = float(np.float32(rng.choice([rng.normal(), np.nan], p=[0.9, 0.1])))
        token = int(rng.integers(40))
        sampled[:2, column] = (token, logprob)
        line.tokens.append(token)
        line.logprobs.append(logprob)
        if line.sequence.job.returns_kept:
            among = rng.integers(0, 40, rng.integers(1, 5)).tolist()
            sampled[2:4, column] = (-column, len(among))
            sampled[4 : 4 + len(among), column] = among
            line.kept.append((-float(column), among))
    is_stop, is_full, is_finite = rows.append(first, sampled)
    for column, line in enumerate(new):
        params = line.sequence.job.sampling
        assert is_stop[column] == (line.tokens[-1] in params.stop_token_ids)
        assert is_full[column] == (len(line.tokens) >= params.max_new_tokens)
        assert is_finite[column] == np.isfinite(line.logprobs[-1])
    experts = rng.integers(0, 9, (3, len(lines)))
    before = [len(line.sequence.experts) for line in lines]
    rows.append_experts(experts.astype(np.float64))
    for row, line in enumerate(lines):
        new_experts = line.sequence.experts[before[row] :]
        wanted = [[experts[:, row].tolist()]] if line.sequence.job.returns_experts else []
        assert [each.tolist() for each in new_experts] == wanted


def _check(rows: Rows, lines: list[Line], first: int) -> None:
    """Compares every input of the next step from row `first` on, and the output so far."""
    assert len(rows) == len(lines)
    inputs = rows.inputs(first)
    every = [line.sequence.job.sampling for line in lines[first:]]
    returns = [line.sequence.job for line in lines[first:]]
    kept = [job.sampling.top_k for job in returns if job.returns_kept]
    assert inputs.kept == max(kept, default=0)
    assert inputs.routed == any(job.returns_experts for job in returns)
    assert inputs.plain == all(
        each.temperature > 0 and each.top_p == 1 and each.top_k == -1 and each.min_p == 0
        for each in every
    )
    is_early = [len(line.tokens) < line.sequence.job.sampling.min_new_tokens for line in lines]
    barred = inputs.state[len(FIELDS) :].T
    assert bool(barred.size) <= any(is_early[first:])
    for column, (line, params) in enumerate(zip(lines[first:], every, strict=True)):
        found = dict(zip(FIELDS, inputs.state[:, column], strict=False))
        number = uniforms(np.array([line.sequence.key]), np.array([len(line.tokens)]))
        assert found["uniform"] == number[0]
        # The last token that was sampled is computed next, at the place after those that are.
        assert found["position"] == line.length - 1
        if line.length > len(line.sequence.job.prompt) and line.sequence.tokens != line.tokens:
            assert found["token"] == line.tokens[-1]
        assert found["temperature"] == params.temperature
        assert found["top_p"] == params.top_p
        assert found["top_k"] == (params.top_k if params.top_k > 0 else np.inf)
        assert found["min_p"] == params.min_p
        if is_early[first + column]:
            assert {*barred[column]} - {-1} == {*params.stop_token_ids}
        elif barred.size:
            assert {*barred[column]} == {-1}
    for row, line in enumerate(lines):
        assert rows.sequences[row] is line.sequence
        assert rows.tail(row, 1000) == line.tokens
        assert rows.tail(row, 2) == line.tokens[-2:]


@pytest.mark.parametrize("seed", range(6))
def test_rows_hold_what_was_added_and_sampled(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows(CAPACITY)
    lines: list[Line] = []
    for _ in range(120):
        first = len(lines)
        if first < CAPACITY and rng.random() < 0.5:
            new = [_line(rng) for _ in range(rng.integers(1, CAPACITY - first + 1))]
            rows.add([line.sequence for line in new], [line.length for line in new])
            lines += new
        elif lines:
            first = 0
        for line in lines[first:]:
            line.length += 1
        _step(rng, rows, lines, first)
        _check(rows, lines, int(rng.integers(len(lines) + 1)))

        full = [
            row
            for row, line in enumerate(lines)
            if len(line.tokens) >= line.sequence.job.sampling.max_new_tokens or rng.random() < 0.05
        ]
        rows.collect(full)
        for row in full:
            line = lines[row]
            assert line.sequence.tokens == line.tokens
            np.testing.assert_array_equal(line.sequence.logprobs, line.logprobs)
            kept = [(among, tokens.tolist()) for among, tokens in line.sequence.kept]
            assert kept == line.kept
        to, origin = rows.remove(full)
        left = len(lines) - len(full)
        assert [*to] == [row for row in full if row < left]
        for hole, mover in zip(to, origin, strict=True):
            assert mover >= left
            lines[hole] = lines[mover]
        del lines[left:]
        _check(rows, lines, 0)
