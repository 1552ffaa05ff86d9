"""The device of a process: an assigned GPU that cannot be used stops every process and states the
reason."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.process.topology import WRONG_SETTING, Topology, assigned_gpus
from common.settings.config import Config
from common.settings.sections import RolloutSection, TrainerSection
from learning.device import choose_device, dtype_on
from learning.ranks import Ranks
from services.reward.functions import LengthPenaltyFunction, RewardModelFunction
from services.rollout.engine_client import engine_command, engine_env
from tests.support.errors import raises
from trainer import ModelEvaluator, TrainerConfig
from trainer import __main__ as program
from trainer.start import job_group
from trainer.start.program import run_rank

GIVEN = [
    ({"SKYPILOT_NUM_GPUS_PER_NODE": "8"}, "SKYPILOT_NUM_GPUS_PER_NODE is 8"),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES is 0,1"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "CUDA_VISIBLE_DEVICES is GPU-8932f937"),
    ({"CUDA_VISIBLE_DEVICES": "MIG-8932f937"}, "CUDA_VISIBLE_DEVICES is MIG-8932f937"),
    (
        {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": ""},
        "SKYPILOT_NUM_GPUS_PER_NODE is 1",
    ),
]
NOT_GIVEN = [
    {},
    {"SKYPILOT_NUM_GPUS_PER_NODE": "0"},
    *({"CUDA_VISIBLE_DEVICES": text} for text in ("", "-1", "-1,0", "none")),
]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every machine look like one without a usable GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("SKYPILOT_NUM_GPUS_PER_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("env", "said"), GIVEN)
def test_assigned_gpus_that_are_unusable_stop_everything(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    set_all(monkeypatch, env)
    assert assigned_gpus() == said
    for start in (
        lambda: choose_device("auto", "--device"),
        lambda: choose_device("cuda", "--device"),
        Ranks,
        lambda: Ranks.from_env(10.0),
        lambda: RewardModelFunction("nothing"),
    ):
        with pytest.raises(ConfigError, match=f"torch finds no GPU, but {said}: .*remedy: "):
            start()
    # The CPU was requested explicitly.
    assert choose_device("cpu", "--device").type == Ranks(device_kind="cpu").device.type == "cpu"


@pytest.mark.parametrize("env", NOT_GIVEN)
def test_without_gpus_the_cpu_computes(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    set_all(monkeypatch, env)
    assert assigned_gpus() is None
    assert choose_device("auto", "--device").type == Ranks().device.type == "cpu"
    with raises(ConfigError, field="trainer.device", value="cuda"):
        Ranks(device_kind="cuda")


class Library:
    """A driver that supports CUDA up to `version`."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = self.version
        return 0


@pytest.mark.parametrize(
    ("cuda", "env", "driver", "said"),
    [
        (None, {}, None, r"torch \S+ is a CPU build.*install the CUDA build of the same version"),
        (
            "13.0",
            {"CUDA_VISIBLE_DEVICES": ""},
            13000,
            r"is '', which hides every GPU.*unset it, or name GPUs",
        ),
        ("13.0", {"CUDA_VISIBLE_DEVICES": "-1"}, 13000, "is '-1', which hides every GPU"),
        ("13.0", {}, None, r"no NVIDIA driver \(libcuda\.so\.1\).*start a container with GPUs"),
        (
            "13.0",
            {},
            12080,
            r"the driver supports CUDA 12\.8, but torch \S+ needs 13\.0.*update the driver",
        ),
        (
            "13.0",
            {"CUDA_VISIBLE_DEVICES": "7"},
            13000,
            "the driver is installed, but gives this process no GPU.*nvidia-smi",
        ),
    ],
)
def test_the_reason_distinguishes_wheel_driver_and_hidden_devices(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    env: dict[str, str],
    driver: int | None,
    said: str,
) -> None:
    def library(name: str) -> Library:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)
        return Library(driver)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(ctypes, "CDLL", library)
    set_all(monkeypatch, {"SKYPILOT_NUM_GPUS_PER_NODE": "2", **env})
    with pytest.raises(ConfigError, match=said + ".*; or set it to cpu to compute on the CPU"):
        choose_device("auto", "trainer.device")


def test_a_gpu_is_chosen_where_there_is_one_and_every_rank_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        choose_device("auto", "--device")
        == choose_device("cuda", "--device")
        == torch.device("cuda", 0)
    )
    assert choose_device("cpu", "--device").type == "cpu"
    assert Ranks(local_rank=1, world_size=2, rank=1).device == torch.device("cuda", 1)
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "8")
    with pytest.raises(
        ConfigError,
        match=r"torch finds 2 GPUs for 3 or more processes.*SKYPILOT_NUM_GPUS_PER_NODE is 8",
    ):
        Ranks(local_rank=2, world_size=8, rank=2)


def test_a_cpu_computes_in_float32_and_a_gpu_in_the_precision_of_the_model() -> None:
    assert dtype_on(torch.device("cpu"), "bfloat16") == torch.float32
    assert dtype_on(torch.device("cuda"), "bfloat16") == torch.bfloat16
    assert dtype_on(torch.device("cuda"), "float32") == torch.float32


def test_the_engine_gets_the_device_and_the_precision() -> None:
    command = engine_command(
        Config(rollout=RolloutSection(engine="embedded")), Topology(), "m", "1"
    )
    assert command[command.index("--device") + 1] == "auto"
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert "--enable-fp32-lm-head" in command
    for use_gpu, kind in ((True, "cuda"), (False, "cpu")):
        config = TrainerConfig(use_gpu=use_gpu).to_config(100, 0, Path("run"))
        assert (config.trainer.device, config.rollout.device) == (kind, kind)


def test_an_evaluation_on_a_missing_gpu_stops() -> None:
    evaluator = ModelEvaluator("nothing", device="cuda", progress=False)
    with raises(ConfigError, field="device", value="cuda"):
        evaluator.evaluate([{"prompt": "1+1?", "ground_truth": "2"}], LengthPenaltyFunction())


@pytest.mark.parametrize(
    ("own", "arguments", "value"),
    [(None, [], "0"), ("1", [], "1"), (None, ["--enable-symm-mem"], "1")],
)
def test_nccl_has_the_same_memory_setting_in_sglang_and_in_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str | None,
    arguments: list[str],
    value: str,
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if own is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", own)
    config = Config(
        rollout=RolloutSection(engine_args=arguments),
        trainer=TrainerSection(run_dir=tmp_path / "run"),
    )
    in_engine = engine_env(config)["NCCL_CUMEM_ENABLE"]
    found: list[str] = []
    monkeypatch.setattr(job_group, "run", lambda *_: found.append(os.environ["NCCL_CUMEM_ENABLE"]))
    monkeypatch.setattr(program, "load", lambda **_: config)
    monkeypatch.setattr(program, "check_models", lambda _: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("signal.signal", lambda *_: None)
    program.main()
    assert [in_engine] == found == [value]


def test_a_trainer_with_gpus_that_it_cannot_use_ends_with_the_status_of_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    set_all(monkeypatch, {"SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_JOBGROUP_NAME": "group"})
    config = Config(state_dir=tmp_path, trainer=TrainerSection(run_dir=tmp_path / "run"))
    monkeypatch.setattr(program, "load", lambda **_: config)
    monkeypatch.setattr(program, "check_models", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit) as end:
        run_rank(program.main)
    assert end.value.code == WRONG_SETTING
    reason = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert reason.startswith("error: torch finds no GPU, but SKYPILOT_NUM_GPUS_PER_NODE is 4: ")
