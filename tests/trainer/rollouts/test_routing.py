"""A group carries the experts of its prompt once, and travels with them."""

import numpy as np
import pytest

from common.errors import ConfigError, InvalidInput
from common.settings.config import Config
from common.settings.sections import RolloutSection, TrainerSection
from common.wire.codec import decode_groups, encode_groups
from common.wire.schemas import Group
from tests.support.batches.groups import batch_of, make_group
from tests.support.errors import raises
from trainer.algorithms.spool import split_routing

_WIDTH = 6
"""Two layers with three experts for a token."""


def routed_group(highest: int) -> tuple[Group, list[np.ndarray]]:
    """Returns a group whose completions have random experts up to `highest`, as the client reads
    them, and these experts, [tokens, 6] of each row."""
    rng = np.random.default_rng(0)
    group = make_group(rng, [1.0, 0.0, 0.0])
    prompt_tokens = len(group.prompt_token_ids)
    of_prompt = rng.integers(0, 200, (prompt_tokens, _WIDTH))
    experts: list[np.ndarray] = []
    for completion in group.completions:
        of_completion = rng.integers(0, 200, (len(completion.token_ids) - 1, _WIDTH))
        experts.append(np.concatenate([of_prompt, of_completion]))
    experts[1][-1, -1] = highest
    for completion, numbers in zip(group.completions, experts, strict=True):
        completion.routed_experts = numbers.astype("<u2").reshape(-1).view(np.uint8)
    return group, experts


@pytest.mark.parametrize(("highest", "size"), [(255, "<u1"), (256, "<u2")])
def test_the_parts_of_a_group_are_the_experts_of_its_rows(highest: int, size: str) -> None:
    group, experts = routed_group(highest)
    split_routing(group)
    (received,) = decode_groups(encode_groups([group]))
    for completion, expected in zip(received.completions, experts, strict=True):
        row = np.concatenate([received.prompt_routed_experts, completion.routed_experts])
        assert row.view(size).reshape(-1, _WIDTH).tolist() == expected.tolist()
    computed = sum(len(completion.token_ids) - 1 for completion in group.completions)
    tokens = len(group.prompt_token_ids) + computed
    stored = group.prompt_routed_experts.nbytes + sum(
        completion.routed_experts.nbytes for completion in group.completions
    )
    assert stored == tokens * _WIDTH * np.dtype(size).itemsize


@pytest.mark.parametrize(
    ("part", "field"),
    [("prompt", "prompt_routed_experts"), ("completion", "completions[2].routed_experts")],
)
def test_a_group_that_lacks_a_byte_is_refused(part: str, field: str) -> None:
    group, _ = routed_group(7)
    split_routing(group)
    if part == "prompt":
        group.prompt_routed_experts = group.prompt_routed_experts[:-1]
    else:
        group.completions[2].routed_experts = group.completions[2].routed_experts[:-1]
    with raises(InvalidInput, field=f"groups[0].{field}"):
        decode_groups(encode_groups([group]))


def test_a_group_without_experts_is_refused_by_a_run_that_replays_them() -> None:
    config = Config(
        trainer=TrainerSection(routing_replay=True), rollout=RolloutSection(engine="embedded")
    )
    group, _ = routed_group(7)
    split_routing(group)
    assert all(row.experts is not None for row in batch_of([group], config).tokens.values())
    assert all(row.experts is None for row in batch_of([group], Config()).tokens.values())
    with pytest.raises(ConfigError) as refused:
        batch_of([make_group(np.random.default_rng(1), [1.0])], config)
    assert refused.value.field == "trainer.routing_replay"
