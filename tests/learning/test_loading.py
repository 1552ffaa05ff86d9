"""Loading without shards in low precision, as on one GPU, executed on a CPU under autocast."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.settings.config import Config
from common.settings.sections import TrainerSection
from learning.hub_names import set_conversions
from learning.loading import AddedModules, Pretrained, SafetensorsReader, load, model_reader
from learning.ranks import Ranks
from learning.sharding import named_tensors
from tests.support.models.tiny_models import make, write

IDS = torch.arange(10, 40)[None]


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "Mixtral", "olmoe", "gpt_oss"])
def test_experts_of_an_unsharded_model_multiply_in_bfloat16(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast does not reach grouped products: without more, they would compute in float32 and a
    compiled layer in a loop."""
    directory = write(kind, tmp_path / "model")
    pretrained = Pretrained(AutoModelForCausalLM, str(directory))
    config = Config(trainer=TrainerSection(compile=False))
    model: Any = load(
        pretrained,
        lambda model: model,
        Ranks(device_kind="cpu"),
        config=config,
        low_precision=True,
    )
    seen = set()
    product = torch.nn.functional.grouped_mm

    def recorded(states: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.add((states.dtype, weights.dtype))
        return product(states, weights, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(IDS, use_cache=False).logits.float().log_softmax(-1)
    found.sum().backward()
    assert seen == {(torch.bfloat16, torch.bfloat16)}

    exact = make(kind)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in exact.named_parameters()
    ]
    experts = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    assert {parameter.dtype for parameter in experts} == {torch.float32}
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in experts)
    with torch.no_grad():
        wanted = exact(IDS, use_cache=False).logits.float().log_softmax(-1)
    assert float((found.detach() - wanted).abs().mean()) < 0.1


def test_files_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    directory = write("Qwen3-MoE", tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith("q_proj.weight"))
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    save_file(kept, path, metadata={"format": "pt"})

    def loaded(**more: Any) -> torch.nn.Module:
        pretrained = Pretrained(AutoModelForCausalLM, str(directory), **more)
        return load(
            pretrained,
            lambda model: model,
            Ranks(device_kind="cpu"),
            config=Config(trainer=TrainerSection(compile=False)),
            low_precision=False,
        )

    with pytest.raises(ValueError, match=f"lack a tensor of the model.*{re.escape(lost)}"):
        loaded()

    class Added(AddedModules):
        """Initialises this tensor, as the critic does its head."""

        def first(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
            return torch.zeros(tuple(shape)) if name == lost else None

    made = loaded(added=Added())
    assert not made.state_dict()[lost].any()


@pytest.mark.parametrize("shift", [0, 8, 24])
def test_weights_are_aligned_whatever_file_they_were_read_from(tmp_path: Path, shift: int) -> None:
    """On a CPU the last bits of a product depend on where its factors lie."""
    directory = write("Qwen2", tmp_path / "model")
    path = directory / "model.safetensors"
    body = path.read_bytes()
    size = int.from_bytes(body[:8], "little")
    header = body[8 : 8 + size] + b" " * shift
    path.write_bytes(len(header).to_bytes(8, "little") + header + body[8 + size :])

    model = load(
        Pretrained(AutoModelForCausalLM, str(directory)),
        lambda model: model,
        Ranks(device_kind="cpu"),
        config=Config(trainer=TrainerSection(compile=False)),
        low_precision=False,
    )
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "Mixtral", "gpt_oss", "Phi-3"])
def test_files_with_each_expert_by_itself_are_read_in_parts(kind: str, tmp_path: Path) -> None:
    """Against transformers, which stacks them; two of three experts are read, and nothing of the
    third."""
    directory = write(kind, tmp_path / "model")
    pretrained = Pretrained(AutoModelForCausalLM, str(directory))
    expected = pretrained.plain().state_dict()
    model = pretrained.empty()
    targets = named_tensors(model)
    set_conversions(model, targets, SafetensorsReader(directory).shapes())
    reader = model_reader(directory, model, targets)
    assert reader is not None

    for name, target in targets.items():
        some = (slice(1, 3), *(slice(0, size) for size in target.shape[1:]))
        assert torch.equal(reader.read(name, some), expected[name][1:3]), name

    one_by_one = kind in ("Qwen3-MoE", "Mixtral")
    first = {name for name in SafetensorsReader(directory).shapes() if ".experts.0." in name}
    assert bool(first) == one_by_one
    for name in first:
        del reader._file_of[name]
    for name, target in targets.items():
        if ".experts." in name:
            reader.read(name, (slice(1, 3), *(slice(0, size) for size in target.shape[1:])))
            with pytest.raises(KeyError) if first else nullcontext():
                reader.read(name, tuple(slice(0, size) for size in target.shape))
