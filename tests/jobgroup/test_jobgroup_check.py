"""`jobgroup/check.py` with the real SkyPilot: the project's job groups pass, and every fault is named with file and task."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.config import load
from common.topology import CRITIC
from jobgroup import spec
from jobgroup.check import undefined

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sky" / "bin" / "python"
MAIN, CPU, PPO = (ROOT / "jobgroup" / f"rlhf-math{kind}-jobgroup.yaml" for kind in ("", "-cpu", "-ppo"))
VOLUMES = [f"--volume={path}" for path in sorted((ROOT / "jobgroup" / "volumes").glob("*.yaml"))]
needs_skypilot = pytest.mark.skipif(
    not PYTHON.exists(), reason="SkyPilot is not installed in .venv-sky: `make check-jobgroup` installs it"
)


@dataclass(frozen=True)
class Fault:
    """An edit of the project's YAML: in the document named `where`, `old` becomes `new`; `told` is in the one problem."""

    where: str
    old: str
    new: str
    told: str
    marked: bool = False
    """Whether it shows only when the lines marked `# volume` are switched on."""

    def apply(self, text: str) -> str:
        documents = text.split("\n---\n")
        place = next(i for i, document in enumerate(documents) if re.search(rf"(?m)^name: {self.where}$", document))
        assert self.old in documents[place]
        documents[place] = documents[place].replace(self.old, self.new, 1)
        return "\n---\n".join(documents)


GROUP, DATA, REWARD, REPLAY, TRAINER = "rlhf-math", "data-server", "reward-server", "replay-buffer", "ppo-trainer"
RESTARTS = "\n  job_recovery: {max_restarts_on_errors: 3}"
RUN_DATA, RUN_TRAINER = "run: exec .venv/bin/python -m services.data", "run: exec .venv/bin/python -m common.topology torchrun"
SETUP = "setup: bash jobgroup/setup.sh services"
SETUP_REWARD = "setup: bash jobgroup/setup.sh reward"
FAULTS = {
    "header-field": Fault(
        GROUP, "inter_connection: true", "interconnection: true", "header: SkyPilot ignores the unknown field"
    ),
    "duplicate-key": Fault(REPLAY, SETUP, f"{SETUP}\n{SETUP}", "Duplicate key 'setup'"),
    "not-parallel": Fault(GROUP, "execution: parallel ", "", "header: execution: parallel is missing"),
    "no-inter-connection": Fault(GROUP, "inter_connection: true", "inter_connection: false", "header: inter_connection is off"),
    "unknown-primary": Fault(GROUP, "[ppo-trainer]", "[trainer]", "primary_tasks references unknown job: trainer"),
    "delay-is-no-time": Fault(GROUP, "10s", "soon", "header: SkyPilot refuses it: Invalid time duration for termination_delay"),
    "no-delay-for-one": Fault(GROUP, "10s", "{default: 10s, replay-buffer: 0s}", f"{REPLAY}: it is ended without delay"),
    "delay-of-unknown": Fault(GROUP, "10s", "{default: 10s, replay: 1m}", "termination_delay references unknown job: replay"),
    "group-name": Fault(
        GROUP, f"name: {GROUP}", "name: rlhf_math", "header: the name 'rlhf_math' cannot be part of a host name"
    ),
    "task-name": Fault(REPLAY, f"name: {REPLAY}", "name: Replay-Buffer", "Replay-Buffer: the name 'Replay-Buffer' cannot be"),
    "same-name-twice": Fault(REPLAY, f"name: {REPLAY}", f"name: {REWARD}", f"Duplicate job name in Job Group: {REWARD}"),
    "no-name": Fault(REWARD, f"name: {REWARD}", "", "task 3: it has no name"),
    "shell-of-run": Fault(DATA, RUN_DATA, "run: if true; then echo", f"{DATA}.run: bash cannot read it: bash: line"),
    "shell-of-setup": Fault(REWARD, SETUP_REWARD, "setup: 'echo \"services'", f"{REWARD}.setup: bash cannot read it"),
    "variable": Fault(DATA, RUN_DATA, "run: echo ${MODEL_NAMES}", f"{DATA}.run: ${{MODEL_NAMES}} is not defined"),
    "skypilot-variable": Fault(DATA, RUN_DATA, "run: echo $SKYPILOT_NODE_RNK", f"{DATA}.run: ${{SKYPILOT_NODE_RNK}} is not"),
    "variable-of-setup": Fault(DATA, f"{SETUP}\n{RUN_DATA}", "setup: A=1; echo $A\nrun: echo $A", f"{DATA}.run: ${{A}} is not"),
    "no-such-node": Fault(
        TRAINER,
        RUN_TRAINER,
        "run: curl http://reward-server-1.${SKYPILOT_JOBGROUP_NAME}:8002 &&",
        f"{TRAINER}.run: no task makes",
    ),
    "no-such-host": Fault(
        TRAINER, RUN_TRAINER, "run: curl http://data-0.rlhf-math:8000 &&", "the host data-0.rlhf-math; there are"
    ),
    "host-in-env": Fault(
        DATA, 'RUN_CONFIG: ""', "REWARD_URL: http://reward-0.rlhf-math:8002", f"{DATA}.envs.REWARD_URL: no task makes the host"
    ),
    "host-in-setup": Fault(
        DATA,
        SETUP,
        "setup: curl replay-buffer-0.$SKYPILOT_JOBGROUP_NAME:8003",
        f"{DATA}.setup: replay-buffer-0.rlhf-math does not",
    ),
    "no-restarts": Fault(REPLAY, RESTARTS, "", f"{REPLAY}: nobody restarts it after an error"),
    "restarts-on-preemption-only": Fault(REPLAY, RESTARTS, "\n  job_recovery: failover", f"{REPLAY}: nobody restarts it"),
    "another-cloud": Fault(REWARD, "infra: kubernetes", "infra: aws", f"{REWARD}: resources.infra is AWS"),
    "unknown-task-field": Fault(REWARD, "cpus: 4+", "cpu: 4+", f"{REWARD}: SkyPilot refuses it"),
    "resources": Fault(REWARD, "cpus: 4+", "cpus: many", f"{REWARD}: SkyPilot refuses it"),
    "no-value": Fault(
        REPLAY, 'BATCH_SIZE: "4" ', "BATCH_SIZE:", f"{REPLAY}: SkyPilot refuses it: Environment variable 'BATCH_SIZE'"
    ),
    "secret-in-the-file": Fault(TRAINER, 'HF_TOKEN: ""', "HF_TOKEN: hf_abc", f"{TRAINER}: the secret HF_TOKEN has its value"),
    "no-workdir": Fault(REPLAY, "workdir: .", "workdir: ./nowhere", f"{REPLAY}: SkyPilot refuses it: Workdir"),
    "no-run": Fault(DATA, RUN_DATA, "", f"{DATA}: run is empty"),
    "no-volume-file": Fault(
        DATA, "rlhf-math-data}", "prompts}", f"{DATA}: there is no file for the volume prompts", marked=True
    ),
    "block-volume-for-several": Fault(
        TRAINER, "rlhf-math-shared}", "rlhf-math-replay}", "3 nodes mount the volume rlhf-math-replay", marked=True
    ),
}


def check(*arguments: str | Path, home: Path) -> tuple[int, str]:
    """Exit status and output of the command, with an empty home and no way to the internet."""
    home.mkdir()
    env = os.environ | {"HOME": str(home), "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [str(PYTHON), "jobgroup/check.py", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert list(home.iterdir()) == []
    assert result.stderr == "" or result.returncode == 2, result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Problems of every fault, all checked by one run: the package takes seconds to import."""
    folder = tmp_path_factory.mktemp("faults")
    for name, fault in FAULTS.items():
        (folder / f"{name}.yaml").write_text(fault.apply(MAIN.read_text(encoding="utf-8")))
    status, output = check(*VOLUMES, *sorted(folder.glob("*.yaml")), home=folder / "home")
    assert status == 1
    return lambda name: re.findall(rf"(?m)^  PROBLEM {re.escape(str(folder / name))}\.yaml(?: \(volumes on\))?: .*$", output)


@needs_skypilot
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_file_and_task(name: str, told: Callable[[str], list[str]]) -> None:
    problems = told(name)
    assert len(problems) == (1 if FAULTS[name].marked else 2), problems
    assert all(FAULTS[name].told in problem for problem in problems), problems
    assert ("(volumes on)" in problems[0]) == FAULTS[name].marked


@needs_skypilot
def test_the_job_groups_of_the_project_are_valid(tmp_path: Path) -> None:
    status, output = check(home=tmp_path / "home")
    assert status == 0, output
    assert "PROBLEM" not in output
    for path, tasks in ((MAIN, 5), (CPU, 5), (PPO, 6)):
        labels = [f"jobgroup/{path.name}", *([] if path == CPU else [f"jobgroup/{path.name} (volumes on)"])]
        for label in labels:
            assert re.search(rf"(?m)^{re.escape(label)}\n(  .*\n){{{tasks}}}  VALID$", output), output
    assert re.search(r"ppo-trainer +2 × Kubernetes\(.*'H100': 1.*\), primary", output)


@needs_skypilot
def test_options_and_files_that_are_wrong(tmp_path: Path) -> None:
    text = MAIN.read_text(encoding="utf-8")
    (tmp_path / "open.yaml").write_text(FAULTS["no-value"].apply(text))
    (tmp_path / "one.yaml").write_text("name: alone\nexecution: parallel\n")
    (tmp_path / "broken.yaml").write_text(f"{text}\n{{")
    (tmp_path / "volume.yaml").write_text("name: rlhf-math-data\ntype: k8s-pvc\nsize: 10Gi\nconfig: {access_mode: Everybody}\n")
    status, output = check(tmp_path / "open.yaml", "--env", "BATCH_SIZE=8", home=tmp_path / "a")
    assert status == 0, output  # a value of the command line fills what the file leaves open
    status, output = check(
        tmp_path / "one.yaml", tmp_path / "broken.yaml", f"--volume={tmp_path}/volume.yaml", home=tmp_path / "b"
    )
    assert status == 1
    assert "one.yaml: file: a job group is a header and at least one task" in output
    assert re.search(r"broken\.yaml: file: .*line \d+", output)
    assert re.search(r"INVALID \S+volume\.yaml: SkyPilot refuses it: .*Everybody", output)
    status, output = check("--env", "1=2", home=tmp_path / "c")
    assert (status, "'1=2' is not NAME=VALUE" in output) == (2, True)


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("echo $A ${B} ${C%.txt} ${D:2}", "A B C D"),
        ("echo ${A:-x} ${B-} ${C:=1} ${D:?give it} ${E:+set}", ""),
        ("echo \\$A '$B ${C}' # $D", ""),
        ('echo "it\'s $A" \'$B\' "\\$C"', "A"),
        ("for a in 1 2; do b=$a; export C=$b; echo $C; done; while read -r d e; do echo $d $e; done", ""),
        ("mapfile -t lines < file; printf -v text x; echo $lines ${text}", ""),
        ("local a=1; (b=2; echo $b); f() { c=$1; echo $c $2 $# $? $@; }; echo $a", ""),
        ("cat <<'END' > f\n$A\nEND\necho $B\ncat <<END\n$C\nEND", "B C"),
        ("echo ${#A} $HOME $GIVEN ${GIVEN/a/b} a#$B", "B"),
        ("if [ $A == 1 ]; then echo ==$C; fi", "A C"),
    ],
)
def test_variables_of_a_script(script: str, missing: str) -> None:
    assert undefined(script, {"GIVEN", "HOME"}) == set(missing.split())


def test_the_cpu_job_group_is_the_other_one_on_a_small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small, large = spec.load(CPU, {}, {}, {}), spec.load(MAIN, {}, {}, {})
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


def test_the_ppo_job_group_is_the_main_one_with_a_critic_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group, main = spec.load(PPO, {}, {}, {}), spec.load(MAIN, {}, {}, {})
    critic = group.task(CRITIC, "")
    settings = {"RLHF_ALGORITHM__NAME": "ppo", "RLHF_CRITIC__LOCATION": "server"}
    for task, other in zip([task for task in group.tasks if task != critic], main.tasks, strict=True):
        assert replace(task, env=dict(task.env)) == replace(other, env=dict(other.env) | settings)
    trainer = main.task(TRAINER, "")
    assert critic == replace(
        trainer, name=CRITIC, num_nodes=1, primary=False, env=critic.env, run="exec .venv/bin/python -m services.critic"
    )
    assert dict(critic.env) == dict(trainer.env) | settings
    for task in group.tasks:
        config = load([], dict(task.env))
        assert config.algorithm.needs_critic
        assert config.critic.location == "server"
    assert f"Port {config.critic.port}." in PPO.read_text(encoding="utf-8")


def test_the_tiny_ppo_settings_are_the_tiny_ones_with_a_critic() -> None:
    small = load(["--config", str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml")], {}).model_dump()
    ppo = load(["--config", str(ROOT / "jobgroup" / "configs" / "tiny-ppo-cpu.yaml")], {}).model_dump()
    assert {name for name in ppo if ppo[name] != small[name]} == {"algorithm", "critic"}
    assert ppo["critic"]["location"] == "trainer"
