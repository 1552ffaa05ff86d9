"""The end of `python -m services.rollout`: its exit status, its last output, and no process left
behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import BloomConfig, BloomForCausalLM

from common.process.topology import WRONG_SETTING
from tests.support.engines.engines import write_model
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration

PORTS = ("ROUTER_PORT", "ENGINE_PORT", "AGENT_PORT", "ROUTER_METRICS_PORT")


def start(
    tmp_path: Path, engine: str | None, ports: list[int], **more: str
) -> subprocess.Popen[str]:
    """Starts a node whose `sglang` is a shell script or is missing, with `more` in its
    environment."""
    script = tmp_path / "python"
    if engine is not None:
        script.write_text(f"#!/bin/sh\n{engine}\n")
        script.chmod(0o755)
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RLHF_", "SKYPILOT_", "JOBGROUP", "RUN_C"))
    }
    numbers = {f"RLHF_ROLLOUT__{name}": str(port) for name, port in zip(PORTS, ports, strict=False)}
    settings = {
        "STATE_DIR": str(tmp_path / "state"),
        "MODEL_NAME": "m",
        "RLHF_ROLLOUT__ENGINE_PYTHON": str(script),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "services.rollout"],
        env=clean | numbers | settings | {"RLHF_TRAINER__PORT": str(ports[4])} | more,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(5)]


@pytest.mark.slow
def test_engine_that_never_starts_ends_the_node_with_its_last_words(
    tmp_path: Path, ports: list[int]
) -> None:
    engine = 'echo "CUDA out of memory; health generation: $SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"; exit 3'
    with start(tmp_path, engine, ports) as node:
        _, errors = node.communicate(timeout=400)
    assert node.returncode == 1
    last = errors[errors.rindex("error: ") :]
    assert "failed to start 5 times in a row" in last
    assert "CUDA out of memory; health generation: 0" in last
    assert "Traceback" not in errors
    log = (tmp_path / "state" / "logs" / "rollout-server-0.engine.log").read_text()
    assert log.count("CUDA out of memory") == 5


CRASHING = """
import http.server, json, os, sys, threading

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"weight_version": "default"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/model_info":
            print("the engine's thread died: of its first request", flush=True)
            threading.Timer(1, os._exit, (70,)).start()

address = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(address, Engine).serve_forever()
"""


@pytest.mark.slow
def test_engine_that_dies_of_every_first_request_ends_the_node_with_its_last_words(
    tmp_path: Path, ports: list[int]
) -> None:
    code = tmp_path / "engine.py"
    code.write_text(CRASHING)
    with start(tmp_path, f'exec {sys.executable} {code} "$@"', ports) as node:
        _, errors = node.communicate(timeout=400)
    assert node.returncode == 1
    last = errors[errors.rindex("error: ") :]
    assert (
        "engine crashed 5 times in a row, most recently: the process ended with status 70" in last
    )
    assert "the engine's thread died: of its first request" in last


@pytest.mark.slow
def test_a_model_that_the_engine_cannot_run_ends_the_node_at_its_first_start(
    tmp_path: Path, ports: list[int]
) -> None:
    """With the status of a wrong setting, so that the job group does not restart it."""
    model = tmp_path / "model"
    write_model(model, seed=0)
    BloomForCausalLM(
        BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=300)
    ).save_pretrained(model)
    settings = {
        "MODEL_NAME": str(model),
        "RLHF_ROLLOUT__ENGINE": "embedded",
        "RLHF_ROLLOUT__DEVICE": "cpu",
    }
    with start(tmp_path, None, ports, SKYPILOT_JOBGROUP_NAME="group", **settings) as node:
        _, errors = node.communicate(timeout=400)
    assert node.returncode == WRONG_SETTING
    last = errors[errors.rindex("error: ") :]
    assert (
        "engine rejects its settings: the embedded engine cannot run this model: ValueError: "
        in last
    )
    assert "rollout.engine sglang" in last


def test_missing_sglang_ends_the_start_with_status_2(tmp_path: Path, ports: list[int]) -> None:
    with start(tmp_path, None, ports) as node:
        _, errors = node.communicate(timeout=400)
    assert node.returncode == 2
    assert "rollout.engine_python" in errors
    assert "rollout.engine=embedded" in errors


def test_sigterm_while_the_engine_loads_ends_everything(tmp_path: Path, ports: list[int]) -> None:
    with start(tmp_path, "sleep 600 & sleep 600", ports) as node:
        main = psutil.Process(node.pid)
        # 2 starters, router, shell, 2 sleeps
        until(lambda: len(main.children(recursive=True)) >= 6, "the engine loads", node)
        family = main.children(recursive=True)
        health = httpx.get(f"http://127.0.0.1:{ports[2]}/health", timeout=30, trust_env=False)
        assert health.status_code == 503
        assert health.json()["reason"]
        node.send_signal(signal.SIGTERM)
        assert node.wait(400) == 0
        _, alive = psutil.wait_procs(family, timeout=400)
        assert alive == []
