"""The command and the environment of SGLang on a CPU, and the settings file of its demo."""

import json
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from common.process.topology import Topology
from common.settings.config import Config
from common.settings.sections import LoraSection, ModelSection, RolloutSection, SamplingSection
from services.rollout.engine_client import engine_command, engine_env
from tests.support.errors import raises
from tests.support.paths import ROOT

CONFIGS = ROOT / "jobgroup" / "configs"


def rollout(tmp_path: Path, **settings: object) -> RolloutSection:
    python = tmp_path / "python"
    python.touch()
    return RolloutSection.model_validate({"engine_python": str(python), **settings})


def test_on_a_cpu_the_arguments_that_need_no_gpu_are_there_and_a_person_has_the_last_word(
    tmp_path: Path,
) -> None:
    section = rollout(
        tmp_path,
        device="cpu",
        max_running_requests=10,
        max_context_tokens=20,
        engine_args=["--page-size", "1"],
    )
    command = engine_command(Config(rollout=section), Topology(), "m", "3")
    options = {word: command[i + 1] for i, word in enumerate(command[:-1]) if word.startswith("--")}
    assert (options["--device"], options["--attention-backend"]) == ("cpu", "torch_native")
    assert options["--dtype"] == "float32"  # regardless of model.dtype, which applies to GPUs
    assert command.count("--dtype") == 1
    assert options["--max-total-tokens"] == "200"
    assert {"--skip-server-warmup", "--sleep-on-idle"} <= set(command)
    assert command[-2:] == ["--page-size", "1"]


def test_on_a_gpu_the_cpu_arguments_are_absent(tmp_path: Path) -> None:
    config = Config(rollout=rollout(tmp_path))
    assert "--device" not in engine_command(config, Topology(), "m", "3")
    quiet = {"TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"}
    toolkit = {"PATH"}  # it includes the directory of SGLang's own programs
    assert (
        set(engine_env(config))
        == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "NCCL_CUMEM_ENABLE"} | quiet | toolkit
    )


def test_for_adapters_sglang_is_told_their_size_and_starts_with_the_model(tmp_path: Path) -> None:
    lora = LoraSection(rank=16)
    command = engine_command(
        Config(rollout=rollout(tmp_path), lora=lora), Topology(), "m", "default"
    )
    options = {word: command[i + 1] for i, word in enumerate(command[:-1]) if word.startswith("--")}
    # Kernels that compute shared experts with the routed ones would leave out their adapter.
    apart = "--disable-shared-experts-fusion"
    assert {"--enable-lora", "--lora-strict-loading", apart} <= set(command)
    assert (options["--max-lora-rank"], options["--lora-target-modules"]) == ("16", "all")
    assert (
        options["--max-loras-per-batch"] == "3"
    )  # the newest adapter, the previous one, and the plain model
    assert "--lora-backend" not in command
    on_cpu = engine_command(
        Config(rollout=rollout(tmp_path, device="cpu"), lora=lora), Topology(), "m", "default"
    )
    assert on_cpu[on_cpu.index("--lora-backend") + 1] == "torch_native"
    merged = Config(rollout=rollout(tmp_path), lora=LoraSection(rank=16, publish="merged"))
    assert {"--enable-lora", apart}.isdisjoint(engine_command(merged, Topology(), "m", "3"))


def test_the_environment_on_a_cpu_names_the_platform_and_keeps_local_models_off_the_hub(
    tmp_path: Path,
) -> None:
    local = engine_env(
        Config(model=ModelSection(name=str(tmp_path)), rollout=rollout(tmp_path, device="cpu"))
    )
    assert (local["SGLANG_PLATFORM"], local["SGLANG_USE_CPU_ENGINE"], local["HF_HUB_OFFLINE"]) == (
        "torch_cpu",
        "0",
        "1",
    )
    assert "HF_HUB_OFFLINE" not in engine_env(Config(rollout=rollout(tmp_path, device="cpu")))


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "phi3", "sliding_window": 2047}, 2047),
        ({"model_type": "qwen2", "sliding_window": 1000, "use_sliding_window": True}, 1000),
        (
            {
                "model_type": "mistral3",
                "text_config": {"model_type": "mistral", "sliding_window": 512},
            },
            512,
        ),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 1000, "use_sliding_window": False}, None),
        (
            {"model_type": "gemma3_text", "sliding_window": 512},
            None,
        ),  # SGLang supports these windows
        ({"model_type": "llama"}, None),
        ([], None),
    ],
)
def test_a_window_that_sglang_does_not_have_bounds_the_context(
    tmp_path: Path, shape: object, window: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = Config(
        rollout=rollout(tmp_path), sampling=SamplingSection(max_new_tokens=(window or 5000) - 1)
    )
    command = engine_command(config, Topology(), str(tmp_path), "3")
    assert ("--context-length" in command) == (window is not None)
    if window is None:
        return
    assert command[command.index("--context-length") + 1] == str(window)
    config.sampling.max_new_tokens = window
    with raises(ConfigError, field="sampling.max_new_tokens", value=str(window)) as refused:
        engine_command(config, Topology(), str(tmp_path), "3")
    assert "attention window" in refused.value.message


LONG = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 4.0]}


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        # Phi-3.5, as published before and after transformers 5, and MiniCPM
        (
            {
                "rope_scaling": {"type": "longrope", **LONG},
                "original_max_position_embeddings": 4096,
                "model_type": "phi3",
            },
            4096,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 4096,
                    **LONG,
                }
            },
            4096,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 32768,
                    **LONG,
                }
            },
            32768,
        ),
        ({"rope_scaling": {"type": "longrope", **LONG, "short_factor": LONG["long_factor"]}}, None),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn"},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            None,
        ),
    ],
)
def test_factors_that_sglang_chooses_by_the_batch_bound_the_context(
    tmp_path: Path, shape: object, bound: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = Config(
        rollout=rollout(tmp_path), sampling=SamplingSection(max_new_tokens=(bound or 5000) - 1)
    )
    command = engine_command(config, Topology(), str(tmp_path), "3")
    assert ("--context-length" in command) == (bound is not None)
    if bound is None:
        return
    assert command[command.index("--context-length") + 1] == str(bound)
    config.sampling.max_new_tokens = bound
    with raises(ConfigError, field="sampling.max_new_tokens", value=str(bound)):
        engine_command(config, Topology(), str(tmp_path), "3")


def test_dynamic_positions_are_refused_with_sglang(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    )
    with raises(ConfigError, field="model.name", value=str(tmp_path)):
        engine_command(Config(rollout=rollout(tmp_path)), Topology(), str(tmp_path), "3")


def test_a_model_that_sglang_computes_otherwise_is_refused_where_nothing_corrects_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoehybrid"}))
    with raises(ConfigError, field="model.name", value=str(tmp_path)):
        engine_command(Config(rollout=rollout(tmp_path)), Topology(), str(tmp_path), "3")
    on_cpu = Config(rollout=rollout(tmp_path, device="cpu"))
    command = engine_command(on_cpu, Topology(), str(tmp_path), "3")
    place = command.index("--mamba-radix-cache-strategy")
    assert command[place + 1] == "no_buffer"
    assert "--disable-overlap-schedule" in command
    assert engine_env(on_cpu)["TRITON_INTERPRET"] == "1"


def test_sglang_is_told_the_cores_of_every_process_on_a_cpu(tmp_path: Path) -> None:
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    assert name not in engine_env(Config(rollout=rollout(tmp_path, device="cpu")))
    parallel = rollout(tmp_path, device="cpu", tensor_parallel_size=4, nodes_per_engine=2)
    assert engine_env(Config(rollout=parallel))[name] == "0|0"


def test_a_missing_python_is_refused_with_the_remedy(tmp_path: Path) -> None:
    missing = Config(rollout=RolloutSection(device="cpu", engine_python=str(tmp_path / "nothing")))
    with raises(ConfigError, field="rollout.engine_python") as caught:
        engine_command(missing, Topology(), "m", "3")
    assert "make sglang-cpu" in (caught.value.remedy or "")


def test_the_two_demos_differ_in_the_engine_alone() -> None:
    embedded, sglang = (
        yaml.safe_load((CONFIGS / name).read_text())
        for name in ("tiny-cpu.yaml", "tiny-sglang-cpu.yaml")
    )
    assert sglang["rollout"] == embedded["rollout"] | {"engine": "sglang", "device": "cpu"}
    assert sglang | {"rollout": None} == embedded | {"rollout": None}
