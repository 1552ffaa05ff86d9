"""The doctor command: exit statuses, settings, hub, secrets, memory of the model, an environment
without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobgroup.doctor import availability, memory, software
from jobgroup.doctor.__main__ import main
from jobgroup.doctor.plan import ROOT, Gpu, make
from jobgroup.doctor.report import Result
from tests.support.package.doctor_groups import (
    LARGE,
    QWEN_7B,
    plan_of,
    serving,
    write_group,
    write_model,
)
from tests.support.processes.ports import free_port

DATA = {"data-server": ""}
SECRET = "hf_ThisIsNeverShown123"  # noqa: S105


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub with one model and one data set, and an empty cache."""
    answers = {
        "/": {},
        "/org/model/resolve/main/config.json": QWEN_7B,
        "/api/datasets/org/open/auth-check": {},
    }
    for name in [
        name for name in os.environ if name.startswith(("HF_", "RLHF_", "SKYPILOT_", "HUGGING"))
    ]:
        monkeypatch.delenv(name)
    with serving(answers) as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield f"http://127.0.0.1:{port}"


def _group(folder: Path, **env: object) -> str:
    return str(
        write_group(
            folder, DATA, {"RLHF_DATA__SOURCE": "tiny", "RLHF_DATA__PORT": free_port(), **env}
        )
    )


def test_a_machine_that_is_ready_ends_with_0_and_json_says_the_same(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = _group(tmp_path)
    assert main([group]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: data-server"
    assert lines[-1].endswith(" 0 fail")
    assert main([group, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"python", "ports", "data set tiny"} <= {check["name"] for check in report["checks"]}
    assert not (tmp_path / "state").exists()


def test_a_wrong_setting_is_a_failed_line_in_its_own_words(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([_group(tmp_path), "--env", "RLHF_TRAINER__BATCH_SIZE=0"]) == 1
    out = capsys.readouterr().out
    assert (
        "FAIL  settings of data-server: invalid value, expected greater than 0 · field: trainer.batch_size · value: 0"
        in out
    )
    assert "\n      fix: give a value that is greater than 0" in out
    assert "ok    python: " in out  # the other checks still run


def test_a_wrong_yaml_is_a_failed_line_too(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "group.yaml"
    path.write_text("name: small\n---\nname: data-server\nrun: x\n")
    assert main([str(path)]) == 1
    assert "FAIL  job group: the header lacks `execution: parallel`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere.yaml"],
        ["--task", "no-task"],
        ["--gpus", "8"],
        ["--gpus", "0", "--plan", "x"],
        ["--gpu-memory-gb", "80"],
        ["--env", "A-B=1"],
        ["--gpu-memory-gb", "-1", "--plan", "x"],
        ["--plan", "nowhere"],
        ["--plan", str(ROOT / "pyproject.toml")],
        ["--what"],
    ],
)
def test_wrong_usage_ends_with_2(
    words: list[str], endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "remedy: " in capsys.readouterr().err


def plan_of_7b(folder: Path, *words: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return ["--plan", str(folder), *words]


def test_the_plan_of_a_model_says_what_fits_and_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan_of_7b(tmp_path, "--gpus", "8")) == 0
    out = capsys.readouterr().out
    assert "ok    trainer: 15.2 GB on each of 8 GPUs between updates; answers of 512 tokens" in out
    assert "ok    a step of 16,384 tokens: router 0.7 MB in, 0.7 MB out" in out
    assert "FAIL  trainer on 24 GB: does not fit: 27.2 GB of 24.0 GB on each of 8 GPUs with" in out
    fastest = "65.9 GB of 80.0 GB on each of 8 GPUs with activation_checkpointing selective, reshard_after_forward false, micro_batch_tokens 8192"
    assert f"ok    trainer on 80 GB: {fastest}" in out
    assert (
        "ok    engine on 24 GB: weights 15.2 GB on each of 1 GPUs, 5.2 GB left for the KV cache: 90,136 tokens"
        in out
    )


def test_the_change_that_the_plan_names_makes_it_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = plan_of_7b(tmp_path, "--gpus", "8", "--gpu-memory-gb", "24", "--json")
    assert main(words) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    tight, _, change = checks["trainer on 24 GB"]["fix"].rpartition(" (")[0].partition("; or ")
    assert "OPTIMIZER__MOMENTS=bfloat16" in tight
    assert "OFFLOAD_OPTIMIZER" in change
    assert main([*words, *change.split()]) == 0


def test_the_plan_accepts_settings_and_an_unknown_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = plan_of_7b(
        tmp_path,
        "--gpus",
        "8",
        "--gpu-memory-gb",
        "80",
        "--env",
        f"RUN_CONFIG={ROOT}/jobgroup/configs/qwen-7b.yaml",
    )
    assert main(words) == 0
    assert (
        "ok    trainer on 80 GB: 65.9 GB of 80.0 GB on each of 8 GPUs with activation_checkpointing selective, reshard_after_forward false"
        in capsys.readouterr().out
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "mamba" in capsys.readouterr().err


def test_no_secret_is_ever_printed(
    tmp_path: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("API_TOKEN", "tooshort-1")
    monkeypatch.setenv("http_proxy", "http://user:proxypassword@127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # The value of this setting is a secret, which the error message repeats.
    status = main([_group(tmp_path), "--env", f"RLHF_TRAINER__BATCH_SIZE={SECRET}", "--json"])
    out = capsys.readouterr().out
    assert status == 1
    assert "[secret]" in out
    assert not [value for value in (SECRET, "tooshort-1", "proxypassword") if value in out]


def test_without_a_yaml_the_demo_is_checked() -> None:
    plan = make(None, {}, {"PATH": os.environ["PATH"]})
    assert (plan.problems, plan.demo, plan.group) == ([], True, "rlhf-math")
    assert [job.name for job in plan.here] == [
        "data-server",
        "rollout-server",
        "reward-server",
        "replay-buffer",
        "ppo-trainer",
    ]
    assert {job.config.model.name for job in plan.here} == {".cache/tiny-base"}
    (fit,) = memory.check_fit(plan)  # `make demo` makes the model after `make doctor`
    assert (fit.state, "made later" in fit.found) == ("ok", True)


@pytest.mark.parametrize(
    ("source", "state", "words"),
    [("tiny", "ok", "generated"), ("prompts.jsonl", "fail", "there is no")],
)
def test_data_sets_are_checked(tmp_path: Path, source: str, state: str, words: str) -> None:
    plan = plan_of(tmp_path, DATA, env={"RLHF_DATA__SOURCE": source})
    (result,) = availability.check_dataset(plan)
    assert (result.state, words in result.found) == (state, True)


def test_a_model_is_found_in_a_folder_and_its_shape_is_read(tmp_path: Path) -> None:
    large = str(write_model(tmp_path / "large", LARGE))
    plan = plan_of(tmp_path, {"ppo-trainer": ""}, env={"MODEL_NAME": large})
    (result,) = availability.check_model(plan, large, plan.here[0])
    assert (result.state, plan.shapes) == ("ok", {large: LARGE})
    (result,) = availability.check_model(plan, str(tmp_path / "nowhere"), plan.here[0])
    assert result.state == "fail"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("env", "states"),
    [
        ({"MODEL_NAME": "org/model", "RLHF_DATA__SOURCE": "org/open"}, ("ok", "ok")),
        ({"MODEL_NAME": "org/none", "RLHF_DATA__SOURCE": "org/missing"}, ("fail", "fail")),
        ({"MODEL_NAME": "org/model", "HF_HUB_OFFLINE": "1"}, ("fail", "fail")),
    ],
    ids=["there", "missing", "offline"],
)
def test_models_and_data_sets_are_looked_for_on_the_hub(
    tmp_path: Path, endpoint: str, env: dict[str, str], states: tuple[str, str]
) -> None:
    """In a process of its own: the hub's library reads the environment once."""
    group = write_group(tmp_path, {**DATA, "environment-server": ""}, env)
    words = ["--json", *(f"--env={name}={value}" for name, value in env.items())]
    done = subprocess.run(
        [sys.executable, "-m", "jobgroup.doctor", str(group), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert (
        found[f"model {env['MODEL_NAME']}"]["state"],
        found[f"data set {env.get('RLHF_DATA__SOURCE', 'gsm8k')}"]["state"],
    ) == states, done.stdout


GPU = Gpu("0", "H100", "GPU-aa", total=80 * 10**9, used=0, driver="580.1")


def _fit(
    folder: Path,
    model: dict[str, object],
    tasks: dict[str, str],
    gpus: int,
    **env: object,
) -> dict[str, Result]:
    plan = plan_of(folder, tasks, env={"MODEL_NAME": "org/model", **env})
    plan.shapes["org/model"] = model
    plan.gpus = [GPU] * gpus
    return {result.name: result for result in memory.check_fit(plan)}


def test_a_model_is_judged_for_the_gpus_of_this_machine(tmp_path: Path) -> None:
    tasks = {"rollout-server": "", "ppo-trainer": "resources: {accelerators: 'H100:8'}\n"}
    env = {
        "RLHF_TRAINER__ACTIVATION_CHECKPOINTING": "true",
        "RLHF_TRAINER__MICRO_BATCH_TOKENS": "16384",
        "RLHF_SAMPLING__MAX_NEW_TOKENS": "8192",
    }
    fitting = _fit(tmp_path, QWEN_7B, tasks, 8, **env)
    assert fitting["model"].found.startswith("7,615,616,512 parameters")
    assert fitting["memory of ppo-trainer"].state == "ok"
    assert (
        "45.9 GB of 80.0 GB on each of 8 GPUs with activation_checkpointing true"
        in fitting["memory of ppo-trainer"].found
    )
    half_full = fitting["passes of the longest answers"]
    assert (half_full.state, "53%" in half_full.found) == ("warn", True)
    assert "micro_batch_tokens auto, 8704, or 16896" in half_full.fix
    assert fitting["memory of an engine"].state == "ok"
    alone = _fit(tmp_path, QWEN_7B, tasks, 1, **env)["memory of ppo-trainer"]
    assert (alone.state, "on each of 1 GPUs" in alone.found) == ("fail", True)
    with_remedy = _fit(tmp_path, QWEN_7B, tasks, 6, RLHF_PARALLEL__SHARD_SIZE=4)[
        "memory of ppo-trainer"
    ]
    assert (with_remedy.state, "parallel.shard_size" in with_remedy.found) == ("fail", True)


def test_an_unknown_architecture_is_reported(tmp_path: Path) -> None:
    result = _fit(tmp_path, {"model_type": "mamba"}, {"ppo-trainer": ""}, 0)["memory for the model"]
    assert (result.state, "mamba" in result.found) == ("warn", True)


def test_versions_are_compared_with_the_pins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "constraints.txt").write_text("pytest==0.1\nprometheus_client==0.2\ntorch==9.9\n")
    found = {
        result.name: result for result in software.check_packages(plan_of(tmp_path, DATA), tmp_path)
    }
    assert found["packages"].state == "warn"
    assert "(0.1 is pinned)" in found["packages"].found
    assert "(0.2 is pinned)" in found["packages"].found
    assert "(9.9 is pinned)" in found["packages"].found


def test_a_package_on_top_of_an_image_counts_and_not_the_one_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version in (("image", "0.5"), ("own", "1.0")):
        metadata = tmp_path / folder / f"thing-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "constraints.txt").write_text("thing==1.0\n")
    (result,) = software.check_packages(plan_of(tmp_path, DATA), tmp_path)
    assert (result.state, result.found) == ("ok", "in the pinned versions")


def test_a_pod_of_an_environment_server_is_checked_for_what_it_uses(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"environment-server": ""}, env={"MODEL_NAME": "org/model"})
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "constraints.txt").write_text("pytest==0.1\n")
    packages = list(software.check_packages(plan, tmp_path))[-1]
    assert packages.fix.endswith("[services]' transformers")
    assert list(availability.models(plan)) == ["org/model"]


@pytest.mark.integration
def test_it_works_where_torch_cannot_be_imported(tmp_path: Path, endpoint: str) -> None:
    """As in the light environment of a service, where importing torch or transformers fails."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from jobgroup.doctor.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, _group(tmp_path), "--json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"] is True


def test_ground_truths_that_cannot_be_graded_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(19)]
    rows.append({"question": "list?", "answer": "['19']"})
    rows.append({"question": "long?", "answer": "x" * 4000})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    status = main(["--data", "--env", f"RLHF_DATA__SOURCE={path}"])

    output = capsys.readouterr().out
    assert status == 0
    assert "warn  row train-eval-20: 'xxx" in output
    assert "20 of 21 can be graded, 1 of them after a repair" in output
