"""Whether engines fit the nodes of a job group, without SkyPilot."""

import pytest

from common.process.topology import ROLLOUT
from tests.support.jobgroups.fit import Placed, problems, warnings


def placed(nodes: int, gpus: tuple[int, ...], **rollout: int) -> Placed:
    env = {f"RLHF_ROLLOUT__{name.upper()}": str(value) for name, value in rollout.items()}
    return Placed(
        name=ROLLOUT,
        nodes=nodes,
        gpus=gpus,
        spot=False,
        env=env,
        mounts=(),
        uploading=(),
        run="exec python",
    )


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (placed(4, (8,), nodes_per_engine=2, tensor_parallel_size=16), None),
        (placed(2, (8,), tensor_parallel_size=8), None),
        (
            placed(3, (8,), nodes_per_engine=2, tensor_parallel_size=16),
            "3 nodes cannot be divided into engines of 2 (rollout.nodes_per_engine)",
        ),
        (
            placed(2, (8, 4), nodes_per_engine=2, tensor_parallel_size=16),
            "an engine needs 8 GPUs on each of its 2 nodes, but a node has 4",
        ),
        (placed(2, (8,), tensor_parallel_size=16), "an engine needs 16 GPUs (rollout.tensor"),
    ],
)
def test_an_engine_must_fit_its_nodes(task: Placed, told: str | None) -> None:
    found = [problem for _, problem in problems([task])]
    if told is None:
        assert found == []
        assert list(warnings([task])) == []
    else:
        assert len(found) == 1
        assert found[0].startswith(told)


def test_gpus_that_an_engine_over_nodes_leaves_idle_are_shown() -> None:
    (warning,) = warnings([placed(2, (8,), nodes_per_engine=2, tensor_parallel_size=8)])
    assert "a node has 8 GPUs, and its engine uses 4" in warning[1]
