"""`make check-jobgroup` with the real SkyPilot: the project's job groups pass; every fault is named with
file and task."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from common.models.memory import (
    FITS_SHARE,
    fastest_fit,
    trainer_host_bytes,
    trainer_memory,
)
from common.settings.config import load
from jobgroup import spec
from jobgroup.local.placement import share_gpus
from tests.support.jobgroups.check import shell_fault
from tests.support.models.model_shapes import GPU, QWEN_05B, QWEN_7B, engine_of
from tests.support.paths import ROOT

PYTHON = ROOT / ".venv-sky" / "bin" / "python"
MAIN, CPU, ONEBOX, ONEGPU, LARGE, SPOT, TOOLS = (
    ROOT / "jobgroup" / f"rlhf-math{kind}-jobgroup.yaml"
    for kind in ("", "-cpu", "-onebox", "-onegpu", "-7b", "-spot", "-tools")
)
GPU_BYTES = {"A100-80GB": 80 * 10**9, "H100": 80 * 10**9, "H200": 141 * 10**9, "B200": 180 * 10**9}
VOLUMES = [f"--volume={path}" for path in sorted((ROOT / "jobgroup" / "volumes").glob("*.yaml"))]
needs_skypilot = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="SkyPilot is not installed in .venv-sky: `make check-jobgroup` installs it",
)


@dataclass(frozen=True)
class Fault:
    """An edit of the project's YAML: `new` replaces `old` in the document `where`; the problem
    reported has `told`."""

    where: str
    old: str
    new: str
    told: str
    volume: bool = False
    """Whether the fault is in a line marked `# volume`, and so not in the YAML without these."""

    def apply(self, text: str) -> str:
        documents = text.split("\n---\n")
        place = next(
            i
            for i, document in enumerate(documents)
            if re.search(rf"(?m)^name: {self.where}$", document)
        )
        assert self.old in documents[place]
        documents[place] = documents[place].replace(self.old, self.new, 1)
        return "\n---\n".join(documents)


GROUP, DATA, ROLLOUT, REWARD, REPLAY, TRAINER = (
    *(
        "rlhf-math",
        "data-server",
        "rollout-server",
        "reward-server",
        "replay-buffer",
        "ppo-trainer",
    ),
)
GPUS = "accelerators: {H100: %d, H200: %d, B200: %d, A100-80GB: %d}"
RESTARTS = "\n  job_recovery: {max_restarts_on_errors: 3}"
RUN_DATA, RUN_TRAINER = (
    "run: exec .venv/bin/python -m services.data",
    "run: exec .venv/bin/python -m trainer.launch",
)
SETUP = "setup: bash jobgroup/setup.sh services"
SETUP_REWARD = "setup: bash jobgroup/setup.sh reward"


def setting(task: str, text: str, told: str) -> Fault:
    """A variable in the `envs` of one task of the YAML, which has only its folder there."""
    folder = {
        ROLLOUT: "STATE_DIR: /shared/state",
        REWARD: "STATE_DIR: /shared/state",
        REPLAY: "STATE_DIR: /state",
    }
    line = f"{folder.get(task, f'RUN_DIR: /shared/runs/{GROUP}')}"
    return Fault(
        task, f"envs: {{{line}}}   # volume", f"envs:\n  {text}\n  {line}   # volume", told
    )


FAULTS = {
    "header-field": Fault(
        GROUP,
        "inter_connection: true",
        "interconnection: true",
        "header: SkyPilot ignores the unknown field",
    ),
    "duplicate-key": Fault(REPLAY, SETUP, f"{SETUP}\n{SETUP}", "Duplicate key 'setup'"),
    "not-parallel": Fault(
        GROUP, "execution: parallel ", "", "header: execution: parallel is missing"
    ),
    "no-inter-connection": Fault(
        GROUP,
        "inter_connection: true",
        "inter_connection: false",
        "header: inter_connection is off",
    ),
    "unknown-primary": Fault(
        GROUP, "[ppo-trainer]", "[trainer]", "primary_tasks references unknown job: trainer"
    ),
    "delay-is-no-time": Fault(
        GROUP,
        "10s",
        "soon",
        "header: SkyPilot refuses it: Invalid time duration for termination_delay",
    ),
    "no-delay-for-one": Fault(
        GROUP,
        "10s",
        "{default: 10s, replay-buffer: 0s}",
        f"{REPLAY}: SkyPilot ends it without delay",
    ),
    "delay-of-unknown": Fault(
        GROUP,
        "10s",
        "{default: 10s, replay: 1m}",
        "termination_delay references unknown job: replay",
    ),
    "group-name": Fault(
        GROUP,
        f"name: {GROUP}",
        "name: rlhf_math",
        "header: the name 'rlhf_math' cannot be part of a host name",
    ),
    "task-name": Fault(
        REPLAY,
        f"name: {REPLAY}",
        "name: Replay-Buffer",
        "Replay-Buffer: the name 'Replay-Buffer' cannot be",
    ),
    "same-name-twice": Fault(
        REPLAY, f"name: {REPLAY}", f"name: {REWARD}", f"Duplicate job name in Job Group: {REWARD}"
    ),
    "no-name": Fault(REWARD, f"name: {REWARD}", "", "task 3: it has no name"),
    "shell-of-run": Fault(
        DATA, RUN_DATA, "run: if true; then echo", f"{DATA}.run: bash cannot read it: bash: line "
    ),
    "shell-of-setup": Fault(
        REWARD, SETUP_REWARD, "setup: 'echo \"services'", f"{REWARD}.setup: bash cannot read it"
    ),
    "no-restarts": Fault(
        REPLAY, RESTARTS, "", f"{REPLAY}: SkyPilot does not restart it after an error"
    ),
    "restarts-on-preemption-only": Fault(
        REPLAY, RESTARTS, "\n  job_recovery: failover", f"{REPLAY}: SkyPilot does not restart it"
    ),
    "another-cloud": Fault(
        REWARD, "infra: kubernetes", "infra: aws", f"{REWARD}: resources.infra is AWS"
    ),
    "unknown-task-field": Fault(REWARD, "cpus: 4+", "cpu: 4+", f"{REWARD}: SkyPilot refuses it"),
    "resources": Fault(REWARD, "cpus: 4+", "cpus: many", f"{REWARD}: SkyPilot refuses it"),
    "no-value": setting(
        REPLAY, "BATCH_SIZE:", f"{REPLAY}: SkyPilot refuses it: Environment variable 'BATCH_SIZE'"
    ),
    "secret-in-the-file": Fault(
        TRAINER, 'HF_TOKEN: ""', "HF_TOKEN: hf_abc", f"{TRAINER}: the secret HF_TOKEN has its value"
    ),
    "no-workdir": Fault(
        REPLAY, "workdir: .", "workdir: ./nowhere", f"{REPLAY}: SkyPilot refuses it: Workdir"
    ),
    "no-run": Fault(DATA, RUN_DATA, "", f"{DATA}: run is empty"),
    "parallel-over-too-few-gpus": setting(
        ROLLOUT, 'RLHF_ROLLOUT__TENSOR_PARALLEL_SIZE: "2"', f"{ROLLOUT}: an engine needs 2 GPUs"
    ),
    "groups-that-do-not-come-out": setting(
        TRAINER,
        'RLHF_PARALLEL__SHARD_SIZE: "4"',
        f"{TRAINER}: 2 processes cannot be divided into groups of 4",
    ),
    "contexts-that-do-not-come-out": setting(
        TRAINER,
        'RLHF_PARALLEL__CONTEXT_SIZE: "4"',
        f"{TRAINER}: 2 processes cannot be divided into groups of 4 (parallel.context_size)",
    ),
    "experts-that-do-not-come-out": setting(
        TRAINER,
        'RLHF_PARALLEL__EXPERT_SIZE: "4"',
        f"{TRAINER}: 2 processes cannot be divided into groups of 4 (parallel.expert_size)",
    ),
    "experts-over-more-than-a-copy": setting(
        TRAINER,
        'RLHF_PARALLEL__SHARD_SIZE: "1"\n  RLHF_PARALLEL__EXPERT_SIZE: "2"',
        f"{TRAINER}: the 1 processes of a copy (parallel.shard_size) cannot be divided",
    ),
    "size-is-no-number": setting(TRAINER, "RLHF_PARALLEL__SHARD_SIZE: all", "a valid integer"),
    "misspelt-setting": setting(
        TRAINER,
        "RLHF_TRAINER__LERNING_RATE: 1",
        f"{TRAINER}: there is no setting trainer.lerning_rate",
    ),
    "renamed": Fault(
        REWARD,
        f"name: {REWARD}",
        "name: rewards",
        f"{TRAINER}: it needs the task {REWARD}, but the tasks are",
    ),
    "tasks-disagree": setting(
        REWARD,
        "MODEL_NAME: Qwen/Qwen2.5-7B-Instruct",
        f"{REWARD}: MODEL_NAME is 'Qwen/Qwen2.5-7B-Instruct', but '' in",
    ),
    "exec-before-an-upload": Fault(
        TRAINER,
        "setup: bash",
        "file_mounts: {/runs/checkpoints: {source: s3://bucket, mode: MOUNT_CACHED}}\nsetup: bash",
        f"{TRAINER}: after run SkyPilot waits until /runs/checkpoints is uploaded",
    ),
    "no-volume-file": Fault(
        DATA,
        "rlhf-math-data}",
        "prompts}",
        f"{DATA}: there is no file for the volume prompts",
        volume=True,
    ),
    "block-volume-for-several": Fault(
        TRAINER,
        "rlhf-math-shared}",
        "rlhf-math-replay}",
        "3 nodes mount the volume rlhf-math-replay",
        volume=True,
    ),
}


def check(*arguments: str | Path, home: Path) -> tuple[int, str]:
    """Returns the exit status and output of the command, run with an empty home and without
    internet."""
    home.mkdir()
    env = os.environ | {
        "HOME": str(home),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    command = [str(PYTHON), "-m", "tests.support.jobgroups.check", *map(str, arguments)]
    result = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert list(home.iterdir()) == []
    assert result.stderr == "" or result.returncode == 2, result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output for all faults and warnings. One run checks them all, because importing the
    package takes seconds."""
    folder, text = tmp_path_factory.mktemp("faults"), MAIN.read_text(encoding="utf-8")
    for name, fault in FAULTS.items():
        (folder / f"{name}.yaml").write_text(fault.apply(text))
    (folder / "spot.yaml").write_text(
        Fault(TRAINER, "  cpus:", "  use_spot: true\n  cpus:", "").apply(text)
    )
    (folder / "idle.yaml").write_text(Fault(ROLLOUT, "H200: 1", "H200: 8", "").apply(text))
    few = "any_of: [{accelerators: H100:2}, {accelerators: A100-80GB:1}, {accelerators: H200:2}]"
    (folder / "few.yaml").write_text(
        Fault(ROLLOUT, GPUS % (2, 2, 2, 2), few, "").apply(LARGE.read_text(encoding="utf-8"))
    )
    status, output = check(*VOLUMES, *sorted(folder.glob("*.yaml")), home=folder / "home")
    assert status == 1
    return output


@pytest.mark.integration
@needs_skypilot
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_file_and_task(name: str, told: str) -> None:
    of_file = re.findall(rf"(?m)^  PROBLEM \S+/{re.escape(name)}\.yaml( \(.*?\))?: (.*)$", told)
    problems = [
        (variant, told)
        for variant, told in of_file
        if "it needs the task" not in told or name == "renamed"
    ]
    assert all(FAULTS[name].told in problem for _, problem in problems), problems
    without = [] if FAULTS[name].volume else [" (without volumes)"]
    assert [variant for variant, _ in problems] == ["", *without, " (with the image)"]


@pytest.mark.integration
@needs_skypilot
@pytest.mark.slow
def test_the_job_groups_of_the_project_are_valid(tmp_path: Path) -> None:
    status, output = check(home=tmp_path / "home")
    assert status == 0, output
    assert "PROBLEM" not in output
    assert "WARNING" not in output
    for path in (MAIN, CPU, ONEBOX, ONEGPU, LARGE, SPOT, TOOLS):
        label = re.escape(f"jobgroup/{path.name}")
        assert re.search(rf"(?m)^{label}\n  VALID$", output), output
        for variant in ["with the image", *([] if path == CPU else ["without volumes"])]:
            assert re.search(rf"(?m)^{label} \({variant}\)\n  VALID$", output), output


@pytest.mark.integration
@needs_skypilot
def test_a_misspelt_variable_is_refused_and_an_unrelated_one_is_not(tmp_path: Path) -> None:
    """Passes `--env` as for a launch: with variables that name a setting, and with unrelated
    ones."""
    words = ("MAX_STEP=10", "LEARNING_RATE=1e-5", "RLHF_TRAINER__BATCH_SIZE=many", "MY_OWN=1")
    status, output = check(MAIN, *(f"--env={word}" for word in words), home=tmp_path / "home")
    assert status == 1
    for told in (
        "did you mean MAX_STEPS?",
        "RLHF_OPTIMIZER__LEARNING_RATE?",
        "expected a valid integer · field: trainer.batch_size",
    ):
        assert told in output
    assert "MY_OWN" not in output


@pytest.mark.integration
@needs_skypilot
def test_a_warning_is_not_a_problem(told: str) -> None:
    files = "(spot|idle|few)"
    assert re.findall(rf"(?m)^  PROBLEM \S+/{files}\.yaml: (.*): ", told) == [
        (
            "few",
            "rollout-server: an engine needs 2 GPUs (rollout.tensor_parallel_size), but a node has 1",
        )
    ]
    assert re.findall(rf"(?m)^  WARNING \S+/{files}\.yaml( \(.*?\))?: ([\w-]+): ", told) == [
        ("idle", "", ROLLOUT),
        ("idle", " (without volumes)", ROLLOUT),
        ("idle", " (with the image)", ROLLOUT),
        ("spot", " (without volumes)", TRAINER),
    ]


@pytest.mark.integration
@needs_skypilot
@pytest.mark.slow
def test_wrong_options_and_files_are_reported(tmp_path: Path) -> None:
    text = MAIN.read_text(encoding="utf-8")
    (tmp_path / "open.yaml").write_text(FAULTS["no-value"].apply(text))
    (tmp_path / "one.yaml").write_text("name: alone\nexecution: parallel\n")
    (tmp_path / "broken.yaml").write_text(f"{text}\n{{")
    (tmp_path / "volume.yaml").write_text(
        "name: rlhf-math-data\ntype: k8s-pvc\nsize: 10Gi\nconfig: {access_mode: Everybody}\n"
    )
    (tmp_path / "no-size.yaml").write_text("name: rlhf-math-replay\ntype: k8s-pvc\n")
    status, output = check(tmp_path / "open.yaml", "--env", "BATCH_SIZE=8", home=tmp_path / "a")
    assert status == 0, output  # a value on the command line replaces the one missing in the file
    status, output = check(
        tmp_path / "one.yaml",
        tmp_path / "broken.yaml",
        f"--volume={tmp_path}/volume.yaml",
        f"--volume={tmp_path}/no-size.yaml",
        home=tmp_path / "b",
    )
    assert status == 1
    assert "one.yaml: file: a job group is a header and at least one task" in output
    assert re.search(r"broken\.yaml: file: .*line \d+", output)
    assert re.search(r"INVALID \S+volume\.yaml: SkyPilot refuses it: .*Everybody", output)
    assert re.search(r"INVALID \S+no-size\.yaml: SkyPilot refuses it: Size is required", output)
    status, output = check("--env", "1=2", home=tmp_path / "c")
    assert (status, "not the name of a variable · field: --env · value: 1" in output) == (2, True)


@pytest.mark.integration
@pytest.mark.parametrize("script", ["if true; then echo", 'echo "services', "echo $(", "f() {"])
def test_a_script_that_bash_cannot_read_is_reported(script: str) -> None:
    assert "bash: line " in shell_fault(f"true\n{script}")


def test_the_cpu_job_group_is_the_main_one_on_a_small_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    small, large = spec.load(CPU), spec.load(MAIN)
    assert [(task.name, task.num_nodes, task.primary) for task in small.tasks] == [
        (task.name, task.num_nodes, task.primary) for task in large.tasks
    ]
    assert [task.run for task in small.tasks] == [task.run for task in large.tasks]
    for task, other in zip(small.tasks, large.tasks, strict=True):
        assert task.gpus == 0
        assert task.env["RUN_CONFIG"] == "jobgroup/configs/tiny-cpu.yaml"
        assert (task.setup or "").startswith(other.setup or "-")
        makes_model = "-m trainer.tiny_model .cache/tiny-base" in (task.setup or "")
        assert makes_model == (task.name in ("rollout-server", "ppo-trainer"))


@pytest.mark.parametrize("path", [ONEBOX, ONEGPU, LARGE, SPOT])
def test_a_variant_differs_from_the_main_job_group_only_in_size(path: Path) -> None:
    (header, *tasks), (main_header, *main_tasks) = (
        list(yaml.safe_load_all(each.read_text(encoding="utf-8"))) for each in (path, MAIN)
    )
    assert header == main_header | {"name": path.name.removesuffix("-jobgroup.yaml")}
    assert len(tasks) == len(main_tasks)
    for task, other in zip(tasks, main_tasks, strict=True):
        free = {"resources", "num_nodes", "envs", "volumes"}
        assert {key: value for key, value in task.items() if key not in free} == {
            key: value for key, value in other.items() if key not in free
        }
        own = {"use_spot", "accelerators", "cpus", "memory", "job_recovery", "image_id"}
        assert {key: value for key, value in task["resources"].items() if key not in own} == {
            key: value for key, value in other["resources"].items() if key not in own
        }
        gpus = task["resources"].get("accelerators", {})
        assert gpus.keys() == other["resources"].get("accelerators", {}).keys()
        assert len(set(gpus.values())) <= 1
    assert path.read_text(encoding="utf-8").count("# image\n") == MAIN.read_text(
        encoding="utf-8"
    ).count("# image\n")


@pytest.mark.parametrize("path", [MAIN, CPU, ONEBOX, ONEGPU, LARGE, SPOT, TOOLS])
def test_all_tasks_load_the_same_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would load exactly these settings. Apart from folders, they are the same in all
    tasks."""
    monkeypatch.chdir(ROOT)
    group = spec.load(path)
    configs = [load([], dict(task.env)) for task in group.tasks]
    assert all(
        config.model_dump(exclude={"state_dir": True, "trainer": {"run_dir"}})
        == configs[0].model_dump(exclude={"state_dir": True, "trainer": {"run_dir"}})
        for config in configs
    )


def test_both_sides_request_one_gpu_and_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = spec.load(ONEGPU)
    assert {task.name: task.gpus for task in group.tasks if task.gpus} == {ROLLOUT: 1, TRAINER: 1}
    assert (
        share_gpus(group.tasks, ["0"])[ROLLOUT]
        == share_gpus(group.tasks, ["0"])[TRAINER]
        == [["0"]]
    )
    assert all(load([], dict(task.env)).rollout.colocate for task in group.tasks)


def test_the_large_variant_fits_its_gpus_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = spec.load(LARGE)
    trainer, rollout = group.task(TRAINER, ""), group.task(ROLLOUT, "")
    config = load([], dict(trainer.env))
    assert config.rollout.tensor_parallel_size == rollout.gpus
    ranks = trainer.num_nodes * trainer.gpus
    fastest = fastest_fit(QWEN_7B, config, ranks, FITS_SHARE * GPU)
    assert trainer_memory(QWEN_7B, fastest, ranks).total < FITS_SHARE * GPU
    assert fastest.trainer.activation_checkpointing == "selective"
    assert (
        trainer_host_bytes(QWEN_7B, config, ranks, trainer.gpus) < 256e9
    )  # the `memory` it requests
    engine = engine_of(QWEN_7B, config, GPU)
    wanted = config.rollout.max_running_requests * (config.sampling.max_new_tokens + 512)
    assert engine.kv_tokens > wanted
    without = config.with_memory_use(False, True, fastest.trainer.pass_tokens)
    assert trainer_memory(QWEN_7B, without, ranks).total > FITS_SHARE * GPU


@pytest.mark.parametrize("path", [MAIN, ONEBOX, ONEGPU, LARGE, SPOT, TOOLS])
def test_the_model_fits_every_gpu_that_skypilot_may_choose(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    group = spec.load(path)
    shape = QWEN_7B if path == LARGE else QWEN_05B
    for document in list(yaml.safe_load_all(path.read_text(encoding="utf-8")))[1:]:
        task = group.task(document["name"], "")
        config = task.settings(task.env)
        for name, count in document["resources"].get("accelerators", {}).items():
            size = GPU_BYTES[name]
            if task.name == ROLLOUT:
                assert count == config.rollout.tensor_parallel_size
                wanted = config.rollout.max_running_requests * (
                    config.sampling.max_new_tokens + 512
                )
                assert engine_of(shape, config, size).kv_tokens > wanted
            else:
                ranks = task.num_nodes * count
                fastest = fastest_fit(shape, config, ranks, FITS_SHARE * size)
                assert trainer_memory(shape, fastest, ranks).total < FITS_SHARE * size


def test_the_tiny_ppo_settings_are_the_tiny_ones_with_a_critic() -> None:
    small = load(
        ["--config", str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml")], {}
    ).model_dump()
    ppo = load(
        ["--config", str(ROOT / "jobgroup" / "configs" / "tiny-ppo-cpu.yaml")], {}
    ).model_dump()
    assert {name for name in ppo if ppo[name] != small[name]} == {"algorithm", "critic"}
