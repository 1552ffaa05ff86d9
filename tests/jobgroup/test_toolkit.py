"""The CUDA toolkit with which SGLang compiles: setup.sh completes it, the agent passes it on, the
doctor checks it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from common.settings.config import from_mapping
from jobgroup.doctor import gpus, software
from jobgroup.doctor.plan import Plan
from services.rollout.engine_client import engine_env, toolkit_env
from tests.support.package.doctor_groups import plan_of
from tests.support.paths import ROOT

WHEELS = "lib/python3.11/site-packages/nvidia/cu13"
SMI = "0, NVIDIA H100 80GB HBM3, GPU-aa, 81559, 12, {driver}"


def _program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _toolkit(home: Path, release: str = "13.0", linked: bool = True) -> Path:
    """A toolkit as setup.sh leaves it; its nvcc only prints a release."""
    _program(
        home / "bin/nvcc",
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n",
    )
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.13").touch()
    if linked:
        (home / "lib64").symlink_to("lib")
        (home / "lib/libcudart.so").symlink_to("libcudart.so.13")
    return home


@pytest.fixture
def setup_folder(tmp_path: Path) -> Path:
    """setup.sh with a uv that installs empty NVIDIA wheels and an apt-get that installs a
    compiler."""
    (tmp_path / "jobgroup").mkdir()
    for name in ("setup.sh", "sglang-requirements.txt", "sglang-overrides.txt"):
        shutil.copy(ROOT / "jobgroup" / name, tmp_path / "jobgroup" / name)
    wheels = f'"$5/{WHEELS}"'
    install = f"mkdir -p {wheels}/lib {wheels}/bin && touch {wheels}/lib/libcudart.so.13 {wheels}/lib/libnvrtc.so.13"
    _program(
        tmp_path / "bin/uv",
        f'#!/bin/sh\nif [ "$1" = venv ]; then mkdir -p "$5/bin"; {install}; fi\n',
    )
    _program(tmp_path / "bin/sudo", '#!/bin/sh\nshift; exec "$@"\n')
    driver = "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1"
    _program(
        tmp_path / "bin/ldconfig",
        f"#!/bin/sh\nprintf '\\tlibc.so.6 => /lib/libc.so.6\\n\\t{driver}\\n'\n",
    )
    for name in (
        "bash",
        "cat",
        "cksum",
        "mkdir",
        "touch",
        "ln",
        "basename",
        "dirname",
        "id",
        "sed",
        "head",
        "sh",
        "chmod",
    ):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    return tmp_path


def _setup(folder: Path) -> "subprocess.CompletedProcess[str]":
    env = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    command = ["bash", "jobgroup/setup.sh", "sglang"]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.integration
def test_setup_completes_the_wheels_and_installs_a_compiler(setup_folder: Path) -> None:
    _program(
        setup_folder / "bin/apt-get",
        '#!/bin/sh\necho "$@" >> calls\ncase $1 in install) ln -s /bin/sh bin/c++;; esac\n',
    )
    home = setup_folder / ".venv-sglang" / WHEELS
    for _ in range(2):  # the second time, everything is installed already
        assert (done := _setup(setup_folder)).returncode == 0, done.stderr
        assert (home / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
        assert (home / "lib64/libnvrtc.so").resolve() == home / "lib/libnvrtc.so.13"
        assert (
            str((home / "lib64/stubs/libcuda.so").readlink())
            == "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
        )
    assert (setup_folder / "calls").read_text().splitlines() == ["update -qq", "install -y -qq g++"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "apt",
    [None, "exit 100", "case $1 in install) exit 100;; esac"],
    ids=["none", "broken", "refuses"],
)
def test_setup_without_a_compiler_says_so_and_fails(setup_folder: Path, apt: str | None) -> None:
    if apt is not None:
        _program(setup_folder / "bin/apt-get", f"#!/bin/sh\n{apt}\n")
    done = _setup(setup_folder)
    assert done.returncode == 1
    assert "there is no C++ compiler" in done.stderr
    assert "install g++" in done.stderr


def test_the_parts_of_the_compiler_are_of_one_release() -> None:
    """nvcc 13.0 with nvvm 13.3 fails: 'ptxas fatal: Unsupported .version 9.5; current version is
    9.0'."""
    lines = (ROOT / "jobgroup/sglang-requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {pins[f"nvidia-{part}"] for part in ("cuda-nvcc", "cuda-crt", "nvvm")} == {"13.0.88"}
    assert pins["nvidia-cuda-cccl"].startswith("13.0.")


def test_the_engine_finds_the_toolkit_of_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, home = _program(tmp_path / "bin/python"), _toolkit(tmp_path / WHEELS)
    env = toolkit_env(python, {"PATH": "/usr/bin"})
    assert env == {
        "CUDA_HOME": str(home),
        "PATH": f"{tmp_path}/bin:{home}/bin:/usr/bin",
    }  # the first folder has ninja
    for name in ("CUDA_HOME", "CUDA_PATH"):
        mine = toolkit_env(python, {"PATH": "/usr/bin", name: "/opt/cuda"})
        assert mine == {"CUDA_HOME": "/opt/cuda", "PATH": f"{tmp_path}/bin:/opt/cuda/bin:/usr/bin"}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    settings = {"engine": "sglang", "engine_python": str(python)}
    started = engine_env(from_mapping({"rollout": settings}))
    assert started["CUDA_HOME"] == str(home)
    assert "CUDA_HOME" not in engine_env(from_mapping({"rollout": settings | {"device": "cpu"}}))
    assert "CUDA_HOME" not in engine_env(
        from_mapping({"rollout": settings | {"engine": "embedded"}})
    )


def test_an_environment_without_the_wheels_leaves_the_toolkit_to_sglang(tmp_path: Path) -> None:
    assert toolkit_env(tmp_path / "bin/python", {"PATH": "/usr/bin"}) == {
        "PATH": f"{tmp_path}/bin:/usr/bin"
    }


def _plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, driver: str = "580.82.07", **env: str
) -> Plan:
    """A rollout node whose nvidia-smi prints a recorded answer, with nothing else on its path."""
    smi = _program(
        folder / "programs/nvidia-smi", f"#!/bin/sh\necho '{SMI.format(driver=driver)}'\n"
    )
    monkeypatch.setenv("PATH", str(smi.parent))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    engine = {"RLHF_ROLLOUT__ENGINE_PYTHON": str(folder / "venv/bin/python")}
    plan = plan_of(folder, {"rollout-server": "", "ppo-trainer": ""}, env={**engine, **env})
    plan.gpus, _ = gpus.visible({})
    return plan


def _verdicts(plan: Plan) -> dict[str, tuple[str, str]]:
    return {result.name: (result.state, result.found) for result in software.check_toolkit(plan)}


@pytest.mark.parametrize(
    ("driver", "state"),
    [
        ("580.82.07", "ok"),
        ("580.65.06", "ok"),
        ("595.58.03", "ok"),
        ("575.57.08", "fail"),
        ("550.163.01", "fail"),
        ("535.54", "fail"),
        ("[N/A]", "fail"),
        ("", "fail"),
    ],
)
def test_the_driver_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, state: str
) -> None:
    found = _verdicts(_plan(tmp_path, monkeypatch, driver))["NVIDIA driver"]
    assert found[0] == state
    assert driver in found[1]


def test_a_complete_toolkit_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(tmp_path, monkeypatch)
    _toolkit(tmp_path / "venv" / WHEELS)
    _program(tmp_path / "programs/c++")
    assert {name: state for name, (state, _) in _verdicts(plan).items()} == {
        "NVIDIA driver": "ok",
        "nvcc": "ok",
        "C++ compiler": "ok",
    }


def test_missing_parts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_SYSTEM_TOOLKIT", str(tmp_path / "no-cuda"))
    plan = _plan(tmp_path, monkeypatch)
    found = _verdicts(plan)
    assert found["nvcc"] == (
        "fail",
        f"nvcc is not in {tmp_path}/no-cuda/bin or on the path, but SGLang compiles kernels with it",
    )
    assert found["C++ compiler"][0] == "fail"
    assert "c++ is not on the path" in found["C++ compiler"][1]
    _toolkit(tmp_path / "venv" / WHEELS, linked=False)
    assert _verdicts(plan)["nvcc"][0] == "fail"
    assert "lib64/libcudart.so" in _verdicts(plan)["nvcc"][1]


def test_a_toolkit_of_another_cuda_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_SYSTEM_TOOLKIT", str(_toolkit(tmp_path / "system", "12.4")))
    state, text = _verdicts(_plan(tmp_path, monkeypatch))["nvcc"]
    assert (state, "CUDA 12.4" in text) == ("fail", True)
    named = _plan(tmp_path, monkeypatch, CUDA_HOME=str(_toolkit(tmp_path / "mine")), CXX="clang++")
    found = _verdicts(named)
    assert found["nvcc"][0] == "ok"
    assert "clang++ is not on the path" in found["C++ compiler"][1]


def test_only_sglang_on_a_gpu_needs_a_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(_verdicts(_plan(tmp_path, monkeypatch, RLHF_ROLLOUT__ENGINE="embedded"))) == [
        "NVIDIA driver"
    ]
    assert list(_verdicts(_plan(tmp_path, monkeypatch, RLHF_ROLLOUT__DEVICE="cpu"))) == [
        "NVIDIA driver"
    ]
    plan = _plan(tmp_path, monkeypatch)
    plan.gpus = ()
    assert _verdicts(plan) == {}
