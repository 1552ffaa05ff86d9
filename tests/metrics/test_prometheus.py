"""docs/reference/prometheus.yml scrapes every node of the job group at its port."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.settings.config import Config
from jobgroup import spec
from tests.support.paths import ROOT

GROUP = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
PAGE = ROOT / "docs" / "reference" / "prometheus.yml"


def jobs() -> list[dict[str, Any]]:
    content = yaml.safe_load(PAGE.read_text(encoding="utf-8"))
    return list(content["scrape_configs"])


def test_every_node_router_and_engine_is_scraped_at_its_port() -> None:
    group = spec.load(GROUP, {})
    config = Config()
    ports = {
        "data-server": config.data.port,
        "reward-server": config.reward.port,
        "replay-buffer": config.replay.port,
        "ppo-trainer": config.trainer.port,
        "rollout-server": config.rollout.agent_port,
    }
    expected = {
        task.name: [
            f"{task.name}-{rank}.{group.name}:{ports[task.name]}"
            for rank in range(1 if task.name == "ppo-trainer" else task.num_nodes)
        ]
        for task in group.tasks
    }
    nodes = [f"rollout-server-{rank}.{group.name}" for rank in range(2)]
    expected["rollout-engine"] = [f"{node}:{config.rollout.engine_port}" for node in nodes]
    expected["router"] = [f"{nodes[0]}:{config.rollout.router_metrics_port}"]
    found = {
        job["job_name"]: [target for node in job["static_configs"] for target in node["targets"]]
        for job in jobs()
    }
    assert found == expected


def test_the_token_goes_to_all_but_the_router() -> None:
    for job in jobs():
        assert ("authorization" in job) == (job["job_name"] != "router"), job["job_name"]


@pytest.mark.integration
def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    token_file = tmp_path / "api_token"
    token_file.write_text("x" * 32)
    path = tmp_path / "prometheus.yml"
    text = PAGE.read_text(encoding="utf-8")
    path.write_text(text.replace("/etc/prometheus/api_token", str(token_file)))
    done = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
