"""The claims of single sections of `checks.gpu_check`: they hold for the real parts and fail
for broken ones."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.update import make_model, random_group, required_flops
from checks.gpu_check import given, head_kernels, lengths, moe, sglang_calls
from checks.gpu_check.__main__ import parse
from checks.gpu_check.harness import Findings
from checks.gpu_check.sections import Given, command
from checks.gpu_check.setting import Setting
from common.clients.rollout import RolloutClient
from common.settings.config import Config
from common.settings.sections import ModelSection, RolloutSection
from services.rollout.engine_client import EngineClient
from tests.support.engines.engines import engine_process, write_model

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture") / "model"
    make_model("small-moe", directory)
    return directory


def on_cpu(directory: Path) -> Setting:
    return Setting("cpu", small=True, scratch=directory)


def failed(found: Findings) -> list[str]:
    return [claim.text for claim in found.claims if claim.verdict == "fails"]


def test_without_sglang_a_model_and_data_their_sections_are_not_reached(tmp_path: Path) -> None:
    found = Findings()
    given.sglang(found, on_cpu(tmp_path))
    given.grpo(found, Setting("cpu", small=False, scratch=tmp_path, model_path=tmp_path))
    assert [claim.verdict for claim in found.claims] == ["not reached", "not reached"]
    assert ["--sglang" in found.claims[0].measured, "--data" in found.claims[1].measured] == [
        True,
        True,
    ]
    assert "--model" not in found.claims[1].measured


def test_what_a_person_gives_reaches_the_section(tmp_path: Path) -> None:
    options = parse(["--out", "x", "--model", str(tmp_path), "--sglang", sys.executable])
    words = command(
        "grpo", "cpu", True, tmp_path, Given(options.model, options.data, options.sglang)
    )
    assert words[-4:] == [str(tmp_path), str(tmp_path), "", sys.executable]


def test_a_path_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", "x", "--data", str(tmp_path / "nothing")])
    assert "does not exist" in capsys.readouterr().err


def test_the_flops_of_a_mixture_are_those_of_its_products(mixture: Path) -> None:
    """The attention's own products, which torch counts apart, are left out on both sides."""
    config = AutoConfig.from_pretrained(mixture)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).train()
    prompt = list(range(10, 40))
    group = random_group("a", prompt, [90], np.random.default_rng(0), vocabulary=config.vocab_size)
    ids = torch.tensor([[*prompt, *group.completions[0].token_ids.tolist()]])
    with FlopCounterMode(display=False) as counter:
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state
        model.lm_head(states[:, len(prompt) :]).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(
        counted.get(operator, 0) for operator in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )

    pairs = len(prompt) ** 2 // 2 + 90 * len(prompt) + 90**2 // 2
    width = config.num_attention_heads * config.head_dim
    attention = 12 * config.num_hidden_layers * width * pairs
    expected = required_flops([group], model) - attention
    assert products == pytest.approx(expected, rel=0.02)


def test_the_flops_of_experts_are_those_of_the_loop_over_them(mixture: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(mixture), dtype=torch.float32
    )
    block: Any = model.get_decoder().layers[0].mlp
    states = torch.randn(40, block.experts.hidden_dim, requires_grad=True)
    _, scores, chosen = block.gate(states.detach())
    with FlopCounterMode(display=False) as counter:
        by_definition(block, states, chosen, scores.detach()).sum().backward()
    assert moe.experts_flops(block.experts, 40, chosen.shape[1]) == counter.get_total_flops()


def by_definition(block: Any, states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    experts = block.experts
    return moe.by_definition(
        states, experts.gate_up_proj, experts.down_proj, chosen=chosen, scores=scores
    )


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_experts_that_compute_something_else_fail(
    mixture: Path, tmp_path: Path, factor: float
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(mixture), dtype=torch.bfloat16
    )
    block: Any = model.get_decoder().layers[0].mlp
    forward = block.experts.forward
    block.experts.forward = lambda *given: forward(*given) * factor
    found = Findings()
    moe._correctness(found, on_cpu(tmp_path), block)
    assert len(found.claims) == 4
    assert bool(failed(found)) == (factor != 1.0)


@needs_triton
@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_a_kernel_of_the_head_that_is_slightly_wrong_fails(apart: float) -> None:
    from trainer.policy import fused_head

    def statistics(logits: Any, targets: Any, **named: Any) -> None:
        fused_head.statistics(logits, targets, **named)
        named["result"][0] += apart

    kernels: Any = SimpleNamespace(statistics=statistics, gradient=fused_head.gradient)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = nn.Linear(8, 50, bias=False, device=device)
    hidden = torch.randn(6, 8, device=device).bfloat16()
    found = Findings()
    head_kernels._error(found, kernels, head, hidden=hidden, targets=torch.arange(6, device=device))
    assert len(found.claims) == 4
    assert [text for text in failed(found) if "torch's" in text] == []
    assert len(failed(found)) == (1 if apart else 0)


def test_every_length_fits_into_a_micro_batch_and_most_differ(
    mixture: Path, tmp_path: Path
) -> None:
    config = on_cpu(tmp_path).config(mixture, "--trainer.micro_batch_tokens", "512")
    sizes = []
    for number in range(12):
        groups = lengths._groups(config, number)
        sizes.append(
            sum(len(group.prompt_token_ids) + lengths._completed(group) for group in groups)
        )
    assert max(sizes) <= 512
    assert len(set(sizes)) > 9


@pytest.mark.integration
@pytest.mark.slow
def test_an_engine_sleeps_and_wakes_up_with_the_weights_it_is_given(tmp_path: Path) -> None:
    """On a CPU, the embedded engine takes the calls that SGLang can answer only on a GPU."""
    model = write_model(tmp_path / "model", seed=0)
    other = write_model(tmp_path / "other", seed=1)
    found = Findings()
    with engine_process(other, tmp_path / "engine.log", "--weight-version", "3") as (url, _):
        rollout = RolloutSection(engine="embedded", engine_port=int(url.rpartition(":")[2]))
        config = Config(model=ModelSection(name=str(model)), rollout=rollout)
        weights = load_file(model / "model.safetensors")
        run = sglang_calls._Run(
            found, on_cpu(tmp_path), config, model=model, weights=weights, other=other, changed={}
        )
        asyncio.run(_sleep(run))
    assert [claim.text for claim in found.claims if claim.verdict == "holds"] == [
        "checksums of the weights that SGLang got after sleep",
        "SGLang generates after its sleep",
    ]
    # A CPU reports no memory, so nothing seems to be released.
    assert failed(found) == ["SGLang releases its memory for an update"]


async def _sleep(run: sglang_calls._Run) -> None:
    async with EngineClient("engine", run.url) as api, RolloutClient("engine", run.url) as client:
        await sglang_calls._sleep(run, api, client, before=0)


@pytest.mark.integration
@pytest.mark.slow
def test_sections_import_no_web_server() -> None:
    modules = "broadcast, checksums, given, head_kernels, lengths, moe, publishing"
    code = f"import sys; from checks.gpu_check import {modules}; print(*{{'fastapi', 'uvicorn'}}.intersection(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )
