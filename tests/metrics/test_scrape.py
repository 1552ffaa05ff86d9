"""The scrape configurations: docs/reference/prometheus.yml, and the one a local run writes for its
own addresses."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobgroup import scrape, spec
from tests.support.paths import ROOT

GROUP = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
TOKEN_FILE = "/etc/prometheus/api_token"  # noqa: S105


def made(
    env: dict[str, str] | None = None,
    token_file: str | None = None,
    hosts: str = "",
    group: Path = GROUP,
) -> dict[str, Any]:
    loaded = spec.load(group, env or {})
    content: dict[str, Any] = yaml.safe_load(
        scrape.configuration(loaded, {"JOBGROUP_HOSTS": hosts}, token_file)
    )
    return content


def targets(content: dict[str, Any]) -> dict[str, list[str]]:
    return {
        job["job_name"]: [target for node in job["static_configs"] for target in node["targets"]]
        for job in content["scrape_configs"]
    }


def test_the_documented_configuration_is_that_of_the_job_group() -> None:
    text = (ROOT / "docs" / "reference" / "prometheus.yml").read_text(encoding="utf-8")
    command = f"python -m jobgroup.scrape jobgroup/{GROUP.name} --token-file {TOKEN_FILE}"
    assert command in text
    assert yaml.safe_load(text) == made(token_file=TOKEN_FILE)


def test_every_node_router_and_engine_is_scraped_at_its_port() -> None:
    found = targets(made({"RLHF_REWARD__PORT": "9002"}))
    assert found == {
        "data-server": ["data-server-0.rlhf-math:8000"],
        "rollout-server": [f"rollout-server-{rank}.rlhf-math:30002" for rank in range(2)],
        "rollout-engine": [f"rollout-server-{rank}.rlhf-math:30001" for rank in range(2)],
        "router": ["rollout-server-0.rlhf-math:29000"],
        "reward-server": ["reward-server-0.rlhf-math:9002"],
        "replay-buffer": ["replay-buffer-0.rlhf-math:8003"],
        "ppo-trainer": ["ppo-trainer-0.rlhf-math:8004"],
    }
    tools = targets(made(group=ROOT / "jobgroup" / "rlhf-math-tools-jobgroup.yaml"))
    assert tools["environment-server"] == ["environment-server-0.rlhf-math-tools:8006"]


def test_the_token_goes_to_all_but_the_router() -> None:
    for job in made(token_file=TOKEN_FILE)["scrape_configs"]:
        expected = None if job["job_name"] == "router" else {"credentials_file": TOKEN_FILE}
        assert job.get("authorization") == expected, job["job_name"]
    assert all("authorization" not in job for job in made()["scrape_configs"])


def test_a_local_run_uses_its_own_addresses() -> None:
    names = (
        "data-server-0",
        "rollout-server-0",
        "rollout-server-1",
        "reward-server-0",
        "replay-buffer-0",
    )
    hosts = ",".join(
        f"{name}.rlhf-math=127.7.{i}.1:{10 * i}"
        for i, name in enumerate((*names, "ppo-trainer-0", "ppo-trainer-1"))
    )
    found = targets(made(hosts=hosts))
    assert found["data-server"] == ["127.7.0.1:8000"]
    assert found["rollout-engine"] == ["127.7.1.1:30011", "127.7.2.1:30021"]
    assert found["router"] == ["127.7.1.1:29010"]


@pytest.mark.integration
def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    token_file = tmp_path / "api_token"
    token_file.write_text("x" * 32)
    path = tmp_path / "prometheus.yml"
    path.write_text(scrape.configuration(spec.load(GROUP), {}, str(token_file)))
    done = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
