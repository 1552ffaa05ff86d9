"""The prediction of a step's bytes and memory, beside rehearsals at true size and the real codec."""

import numpy as np
import pytest

from common.models.flow import STORED, answer_flow
from common.settings.config import load
from common.wire import codec
from common.wire.schemas import Completion, Group

MEASURED = {
    1 / 64: {
        "trainer rank 0": (668, 50.3, 20.9),
        "trainer, other ranks": (579, 4.2, 4.3),
        "router": (123, 46.0, 46.2),
        "replay-buffer": (121, 12.5, 0.0),
        "reward-server": (121, 4.1, 0.0),
    },
    1 / 32: {
        "trainer rank 0": (672, 100.5, 41.9),
        "trainer, other ranks": (586, 8.5, 8.4),
        "router": (126, 92.0, 92.6),
        "replay-buffer": (155, 25.0, 0.0),
        "reward-server": (123, 8.2, 0.0),
    },
    1 / 8: {
        "trainer rank 0": (897, 401.7, 167.2),
        "trainer, other ranks": (660, 33.8, 33.6),
        "readers of answers": (498, 0.0, 0.0),
        "router": (148, 333.5, 380.8),
        "replay-buffer": (173, 99.9, 0.0),
        "reward-server": (140, 32.7, 0.0),
    },
}
"""Peak, received and sent MB by share of the 7B case (docs/reports/archive/2026-11-28-true-size.md),
without 9.7 MB of gradients that the ranks of a rehearsal sum over gloo."""


@pytest.mark.parametrize("share", MEASURED)
def test_the_prediction_is_within_a_fifth_of_the_rehearsals(share: float) -> None:
    words = ["--trainer.batch_size", str(round(512 * share)), "--sampling.group_size", "16"]
    tokens = 512 * 16 * 8192 * share
    flow = answer_flow(load(words, {}), tokens, ranks=2, engines=8 * share)
    for task, measured in MEASURED[share].items():
        found = flow[task]
        for size, expected in zip(
            (found.memory, found.received, found.sent), measured, strict=True
        ):
            assert size / 1e6 == pytest.approx(expected, rel=0.2), task


ROUTED = {
    "trainer rank 0": 870,
    "trainer, other ranks": 604,
    "readers of answers": 1283,
    "router": 987,
    "reward-server": 121,
}
"""Peak MB for a 128th of the 30B-A3B case, with routing replay."""


def test_the_peaks_of_routing_replay_are_within_a_fifth_of_the_rehearsal() -> None:
    words = ["--trainer.batch_size", "4", "--sampling.group_size", "16"]
    flow = answer_flow(
        load(words, {}), 4 * 16 * 8192, ranks=2, engines=2 * 16 / 256, experts_of_token=48 * 8
    )
    for task, expected in ROUTED.items():
        assert flow[task].memory / 1e6 == pytest.approx(expected, rel=0.2), task
    assert flow["trainer rank 0"].received / 1e6 == pytest.approx(1127, rel=0.2)


def test_more_ranks_share_the_rows_and_not_the_answers() -> None:
    two, eight = (answer_flow(load([], {}), 1e6, ranks, engines=1.0) for ranks in (2, 8))
    assert two["router"] == eight["router"]
    assert two["trainer rank 0"].sent < eight["trainer rank 0"].sent
    assert two["trainer, other ranks"].memory > eight["trainer, other ranks"].memory
    alone = answer_flow(load([], {}), 1e6, 1, engines=1.0)["trainer, other ranks"]
    assert (alone.received, alone.sent) == (0.0, 0.0)


def test_experts_are_stored_only_where_groups_are_reused() -> None:
    plain = answer_flow(load([], {}), 1e6, 2, engines=1.0, experts_of_token=384)
    assert plain["replay-buffer"].received == STORED * 1e6
    assert plain["router"].received == (44 + 384 * 16 / 3) * 1e6
    config = load(["--replay.reuse_ratio", "0.5"], {})
    reused = answer_flow(config, 1e6, 2, engines=1.0, experts_of_token=384)
    assert reused["replay-buffer"].received == (STORED + 384) * 1e6
    assert reused["replay-buffer"].sent == reused["replay-buffer"].received / 2


def test_a_stored_token_takes_what_is_said() -> None:
    tokens = 4000
    rng = np.random.default_rng(0)
    completion = Completion(
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        logprobs=-rng.exponential(0.5, tokens).astype(np.float32),
        text="so we add " * (4 * tokens // 10),
        finish_reason="stop",
        weight_versions=[(0, 0, tokens)],
    )
    group = Group(
        id="g",
        prompt_id="p",
        prompt="1 + 1?",
        ground_truth="2",
        prompt_token_ids=np.zeros(200, np.int32),
        completions=[completion] * 8,
    )
    assert len(codec.encode_groups([group])) / (8 * tokens) == pytest.approx(STORED, rel=0.2)
