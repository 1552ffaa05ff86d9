"""What the arguments of SGLang say about the GPUs of an engine, and which are refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from common.settings.config import Config


def config(tmp_path: Path, **rollout: object) -> Config:
    python = tmp_path / "python"
    python.touch()
    return Config.model_validate({"rollout": {"engine_python": str(python), **rollout}})


@pytest.mark.parametrize("words", [["--node-rank", "1"], ["--dist-init-addr=a:1"]])
def test_an_engine_over_several_nodes_is_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises((ValidationError, ValueError), match="an engine runs on one node"):
        config(tmp_path, engine_args=words)


@pytest.mark.parametrize(
    ("rollout", "gpus"),
    [
        ({"tensor_parallel_size": 16}, 16),
        ({"tensor_parallel_size": 8, "engine_args": ["--pp-size=2"]}, 16),
        (
            {
                "tensor_parallel_size": 16,
                "engine_args": ["--dp-size", "8", "--enable-dp-attention"],
            },
            16,
        ),
        ({"tensor_parallel_size": 2, "engine_args": ["--dp=4"]}, 8),
    ],
)
def test_the_gpus_of_an_engine_are_counted_over_its_groups(
    tmp_path: Path, rollout: dict[str, object], gpus: int
) -> None:
    assert config(tmp_path, **rollout).rollout.gpus_per_engine == gpus
