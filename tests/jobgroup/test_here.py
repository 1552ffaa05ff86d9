"""Fields of a job group that only a cluster provides: what a local run and the doctor make of
them."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from jobgroup import spec
from jobgroup.doctor.plan import make
from jobgroup.doctor.storage import needs
from tests.support.package.doctor_groups import QWEN_05B, QWEN_7B, write_group
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.processes.local_run import LocalRun

VOLUMES = "volumes: {/data: one, /other: {name: two}}\n"
IMAGE = "resources: {infra: kubernetes, image_id: 'docker:some/image:1', accelerators: {H100: 2, H200: 2}}\n"


def _gpus(tmp_path: Path, resources: str) -> int:
    path = write_group(tmp_path, {"main": f"resources: {resources}\n"}, {})
    return spec.load(path).tasks[0].gpus


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ("{accelerators: {H100: 2, H200: 2}}", 2),
        ("{accelerators: [H100:4, H200:2]}", 4),
        ("{any_of: [{accelerators: H100:4}, {accelerators: H200:2}]}", 4),
        ("{ordered: [{accelerators: {H100: 4}}, {accelerators: H200:2}]}", 4),
        ("{accelerators: H100:8, any_of: [{use_spot: true}, {use_spot: false}]}", 8),
        ("{accelerators: H100:8, any_of: [{accelerators: L4:2}]}", 2),
        ("{accelerators: H100:8, any_of: []}", 8),
        ("{any_of: [{cpus: 4+}, {cpus: 8+}]}", 0),
    ],
)
def test_the_gpus_of_the_first_alternative_count(tmp_path: Path, resources: str, gpus: int) -> None:
    assert _gpus(tmp_path, resources) == gpus


def test_a_variable_for_a_volume_is_known(tmp_path: Path) -> None:
    env = {
        "STATE_DIR": "/data/state",
        "RUN_DIR": "/database/run",
        "HF_HOME": "/other",
        "A": "data/b",
        "B": "7",
    }
    path = write_group(tmp_path, {"main": VOLUMES}, env)
    task = spec.load(path).tasks[0]
    assert task.on_volumes == ("STATE_DIR", "HF_HOME")
    assert dict(task.without_volumes().env) == {"RUN_DIR": "/database/run", "A": "data/b", "B": "7"}
    given = spec.load(path, {"STATE_DIR": "/data/second"}).tasks[0]
    assert given.on_volumes == ("HF_HOME",)
    assert given.without_volumes().env["STATE_DIR"] == "/data/second"


@pytest.mark.integration
def test_a_local_run_needs_no_volume_and_no_image(
    local: "LocalRun", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATE_DIR", raising=False)
    envs = "envs: {STATE_DIR: /data/state, RUN_DIR: /other/run, KEPT: x}\n"
    task = f'name: main\n{envs}{VOLUMES}{IMAGE}run: echo "$KEPT|${{STATE_DIR-unset}}|${{RUN_DIR-unset}}|"\n'
    status, out, err = local.run(
        f"name: small\nexecution: parallel\n---\n{task}", "--env", "RUN_DIR=runs/mine"
    )
    assert (status, err) == (0, "")
    assert local.log("main-0").strip() == "x|unset|runs/mine|"
    assert "volumes and file_mounts of main are only for a cluster" in out


def test_the_doctor_takes_a_volume_into_account_only_where_it_is_mounted(tmp_path: Path) -> None:
    path = write_group(tmp_path, {"data-server": f"{VOLUMES}{IMAGE}"}, {"STATE_DIR": "/data/state"})

    def state_dir(env: dict[str, str]) -> Path:
        return make(path, {}, env, task="data-server").here[0].config.state_dir

    assert state_dir({}) == Path("runs/small/state")
    pod = {"SKYPILOT_JOBGROUP_NAME": "small"}
    assert state_dir(pod) == Path("/data/state")
    local = pod | {"JOBGROUP_HOSTS": "data-server-0.small=127.0.0.1:0"}
    assert state_dir(local) == Path("runs/small/state")


@pytest.mark.parametrize("kind", ["", "-7b", "-spot", "-tools"])
def test_the_volumes_have_room_for_what_the_doctor_expects(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "jobgroup" / f"rlhf-math{kind}-jobgroup.yaml"
    rooms = {}
    for file in (ROOT / "jobgroup" / "volumes").glob("*.yaml"):
        volume = yaml.safe_load(file.read_text())
        rooms[volume["name"]] = int(volume.get("size", "0Gi").removesuffix("Gi")) << 30
    expected = Counter[str]()
    for document in list(yaml.safe_load_all(path.read_text()))[1:]:
        pod = {"SKYPILOT_JOBGROUP_NAME": document["name"]}
        plan = make(path, {}, pod, task=document["name"])
        plan.shapes[plan.here[0].config.model.name] = QWEN_7B if kind == "-7b" else QWEN_05B
        ((mount, name),) = document["volumes"].items()
        for need in needs(plan):
            if need.folder.is_relative_to(mount):
                expected[name] += need.size
    assert len(expected) == 3
    assert all(expected[name] < rooms[name] for name in expected), (expected, rooms)
