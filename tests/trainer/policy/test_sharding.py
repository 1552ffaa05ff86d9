"""Sharded policies: the same update on any number of ranks, from files visible to all ranks or only
to rank 0."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.loading import Pretrained, fill, materialise
from learning.ranks import Ranks
from learning.sharding import named_tensors
from tests.support.batches.groups import VOCABULARY, save
from tests.support.batches.sharding import One, arguments, run_cases
from tests.support.errors import raises
from tests.support.models.tiny_models import make
from tests.support.processes.forks import Forked
from tests.support.workers.sharded_policies import learned
from trainer.policy.checkpoint import CheckpointFailed, Checkpoints, RunState, newest
from trainer.policy.policy import Policy

_UNITS = 3
"""Two decoder layers, and the rest of the model."""
_MICRO_BATCHES = 3
OFTEN = ("again", "once", "once_every", "once_recomputed")


def messages(directory: Path, name: str, kind: str) -> int:
    found = json.loads((directory / f"{name}-messages.json").read_text())
    return sum(count for operation, count in found.items() if kind in operation)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def one(policy_dir: Path, directory: Path) -> One:
    return One(policy_dir, directory)


@pytest.mark.integration
def test_the_update_is_the_same_however_models_are_spread(
    policy_dir: Path, directory: Path, one: One
) -> None:
    """With weight decay, clipping, and a reference that is refreshed; resumed runs continue with
    the third update."""
    settings = arguments(policy_dir)
    replicated = arguments(policy_dir, shard_size=1)
    offload = arguments(
        policy_dir, offload_optimizer=True, offload_reference=True, activation_checkpointing=True
    )
    cases: dict[str, dict[str, Any]] = {
        "sharded": {"settings": settings, "messages": True},
        "replicated": {"settings": replicated},
        "offload": {"settings": offload},
        "from_one": {"settings": settings, "resume": "one", "updates": 1},
        "saves": {"settings": settings, "save": "two", "updates": 2},
        "saves_replicated": {"settings": replicated, "save": "two_replicated", "updates": 2},
        "saves_alone": {"settings": settings, "save": "alone", "updates": 2, "hidden": True},
        "to_replicated": {"settings": replicated, "resume": "two", "updates": 1},
        "from_replicated": {"settings": settings, "resume": "two_replicated", "updates": 1},
        "hidden": {"settings": settings, "resume": "alone", "updates": 1, "hidden": True},
        "hidden_replicated": {
            "settings": replicated,
            "resume": "two",
            "updates": 1,
            "hidden": True,
        },
        "every": {"settings": settings, "whole": 0, "messages": True},
        "parked": {"settings": settings, "parked": True},
    }
    run_cases(2, directory, cases)
    for name, case in cases.items():
        if "save" not in case:
            one.check(directory, name, 2)
    once, every = (messages(directory, name, "reduce_scatter") for name in ("sharded", "every"))
    assert once == 3 * _UNITS, "one sum of the gradients of every unit in each of three updates"
    assert every == once * _MICRO_BATCHES
    shares = {
        path.name
        for path in (directory / "two" / "checkpoints" / "step_000002" / "state").iterdir()
    }
    assert shares == {".metadata", "__0_0.distcp", "__1_0.distcp"}, "every rank writes its share"
    assert not list((directory / "alone").rglob("__1_0.distcp"))
    back = {"settings": settings, "updates": 1}
    run_cases(
        1,
        directory,
        {f"back_{name}": back | {"resume": name} for name in ("two", "two_replicated", "alone")},
    )
    for name in ("two", "two_replicated", "alone"):
        one.check(directory, f"back_{name}", 1)
        path = newest(directory / name / "checkpoints")
        assert path is not None
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.integration
@pytest.mark.parametrize("names", [("again", "once"), pytest.param(OFTEN, marks=pytest.mark.slow)])
def test_weights_that_are_gathered_once_are_those_of_the_last_update(
    policy_dir: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """The second update has no gradient: AdamW moves the weights, and no backward pass frees the
    old ones, which the comparison with the engine gathered."""
    groups = [(0, 3), (2,), (0, 3), (3, 0)]
    no_reference = ["--algorithm.kl_coef", "0", "--algorithm.reference_refresh", "0"]
    plain = [*arguments(policy_dir), *no_reference]
    once = [*plain, "--parallel.reshard_after_forward", "false"]
    recomputed = [*once, "--trainer.activation_checkpointing", "selective"]
    policy = Policy(load(plain, {}), Ranks())
    expected = torch.tensor(learned(policy, 0, groups=groups))
    assert expected[1, 1] == 0

    cases: dict[str, dict[str, Any]] = {
        "again": {"settings": plain},
        "once": {"settings": once},
        "once_every": {"settings": once, "whole": 0},
        "once_recomputed": {"settings": recomputed},
    }
    counted = {name: cases[name] | {"groups": groups, "messages": True} for name in names}
    run_cases(2, tmp_path, counted)
    for name in names:
        found = torch.tensor(json.loads((tmp_path / f"{name}.json").read_text()))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name)
        weights = load_file(tmp_path / f"{name}-0.safetensors")
        for key, tensor in policy.weights():
            torch.testing.assert_close(weights[key], tensor, atol=3e-5, rtol=0, msg=f"{name} {key}")
    gathered = {name: messages(tmp_path, name, "allgather") for name in names}
    once_each = len(groups) * _UNITS
    for name in {"once", "once_every"} & gathered.keys():
        assert gathered[name] == once_each
    assert gathered["again"] > 2 * once_each


@pytest.mark.integration
@pytest.mark.slow
def test_compiled_layers_make_the_same_update(policy_dir: Path, directory: Path, one: One) -> None:
    settings = arguments(policy_dir, compile=True, activation_checkpointing=True)
    run_cases(2, directory, {"compiled": {"settings": settings}})
    one.check(directory, "compiled", 2)


@pytest.mark.integration
def test_groups_of_ranks_that_share_a_copy(policy_dir: Path, directory: Path, one: One) -> None:
    counted = {"settings": arguments(policy_dir, shard_size=2), "messages": True}
    run_cases(4, directory, {"hsdp": counted, "hsdp_every": counted | {"whole": 0}})
    for name in ("hsdp", "hsdp_every"):
        one.check(directory, name, 4)
    assert messages(directory, "hsdp", "reduce_scatter") == 3 * _UNITS
    assert messages(directory, "hsdp_every", "reduce_scatter") > 3 * _UNITS
    between_copies = [messages(directory, name, "allreduce") for name in ("hsdp", "hsdp_every")]
    assert between_copies[0] == between_copies[1], (
        "gradients are summed between the copies once either way"
    )


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (4, 3), (2, 4)])
def test_ranks_that_cannot_be_divided_are_refused(ranks: int, size: int) -> None:
    with raises(ConfigError, field="parallel.shard_size"):
        Ranks(world_size=ranks, shard_size=size)


def test_an_unsharded_model_is_not_offloaded(config: Config) -> None:
    config.parallel.offload_optimizer = True
    with raises(ConfigError, field="parallel.offload_optimizer"):
        Policy(config, Ranks())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_made_on_the_meta_device_equals_from_pretrained(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    from learning.loading import SafetensorsReader
    from trainer.cli.tiny_base import make_model

    torch.manual_seed(3)
    model = make_model(VOCABULARY, 1, 0)
    model.config.tie_word_embeddings = tied
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    pretrained = Pretrained(AutoModelForCausalLM, str(tmp_path))
    expected, found = pretrained.plain(), pretrained.empty()
    assert all(parameter.is_meta for parameter in found.parameters())
    materialise(found, torch.device("cpu"), torch.device("cpu"))
    fill(named_tensors(found), SafetensorsReader(tmp_path).read, Ranks(), everywhere=True)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    for ours, theirs in (
        (found.state_dict(), expected.state_dict()),
        (buffers(found), buffers(expected)),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert tensor.dtype == ours[name].dtype
            assert torch.equal(ours[name], tensor), name


def buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


@pytest.mark.integration
def test_loading_never_holds_the_model_twice(tmp_path: Path) -> None:
    """A model of 120 MB on two ranks: beyond its start, a rank needs far less than twice the
    model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    run_cases(
        2, tmp_path, {"peak": {"settings": ["--model.name", str(tmp_path / "model")], "peak": True}}
    )
    for rank in (0, 1):
        peak = int((tmp_path / f"peak-{rank}.txt").read_text())
        assert size / 2 < peak < 1.5 * size, (peak, size)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["missing", "killed"])
def test_an_incomplete_checkpoint_leaves_the_previous_one(
    config: Config, tmp_path: Path, kind: str
) -> None:
    """Either the process is killed while it writes, or writing fails; then the next step reports
    the failure."""
    policy = Policy(config, Ranks())
    first = save(policy, tmp_path)
    policy.step = 1
    if kind == "killed":
        log = tmp_path.with_suffix(".log")
        writer = Forked(
            "tests.support.workers.killed_save", config.model.name, str(tmp_path), log=log
        )
        assert writer.wait(400) == 9, log.read_text()
        assert (tmp_path / "step_000001.partial").is_dir()
    else:
        checkpoints = Checkpoints(tmp_path, Ranks(), 3, static=lambda: [tmp_path / "is not there"])
        checkpoints.save(RunState(1, 7, "run", 0.0), policy.snapshots(gathered=False))
        with raises(CheckpointFailed, field="trainer.run_dir"):
            checkpoints.wait()
    assert newest(tmp_path) == first
    second = save(policy, tmp_path)
    assert newest(tmp_path) == second
    assert not list(tmp_path.glob("*.partial"))


def test_the_best_checkpoint_stays(config: Config, tmp_path: Path) -> None:
    policy = Policy(config, Ranks())
    for policy.step, accuracy in enumerate([None, 0.2, 0.5, 0.4, None, 0.3], 1):
        save(policy, tmp_path, keep=2, accuracy=accuracy)
    assert (tmp_path / "best").resolve() == tmp_path / "step_000003"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "step_000003", "step_000005", "step_000006"]
    policy.step = 7
    save(policy, tmp_path, keep=2, accuracy=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "step_000006",
        "step_000007",
    ]


def test_a_checkpoint_holds_the_model_of_its_step(config: Config, tmp_path: Path) -> None:
    """A thread writes a copy, so later updates do not reach it."""
    policy = Policy(config, Ranks())
    expected = {name: tensor.clone() for name, tensor in policy.weights()}
    gate = threading.Event()

    def static() -> list[Path]:
        gate.wait(400)
        return []

    checkpoints = Checkpoints(tmp_path, Ranks(), 3, static=static)
    path = checkpoints.save(RunState(0, 0, "run", 0.0), policy.snapshots(gathered=False))
    learned(policy, 1)
    assert newest(tmp_path) is None
    gate.set()
    checkpoints.wait()
    written = load_file(path / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, expected[name]) for name, tensor in policy.weights())


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_a_mixture_is_sharded_saved_and_resumed_as_its_files_have_it(
    kind: str, policy_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(policy_dir, directory)
    make(kind, vocab_size=VOCABULARY).save_pretrained(directory)
    one = One(directory, tmp_path)
    assert one.weights.keys() == load_file(directory / "model.safetensors").keys()
    settings = arguments(directory)
    cases: dict[str, dict[str, Any]] = {
        "saves": {"settings": settings, "save": "two", "updates": 2},
        "sharded": {"settings": settings},
        "resumed": {"settings": settings, "resume": "two", "updates": 1},
    }
    run_cases(2, tmp_path, cases)
    for name in ("sharded", "resumed"):
        one.check(tmp_path, name, 2)
