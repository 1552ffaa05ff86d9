"""The engines of the Python API: several servers, and an SGLang that the trainer starts, restarts
and ends."""

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvicorn

from common.clients.base import Unreachable, wait_healthy
from common.errors import ConfigError, ServiceError, ServiceLost
from services.data.tiny import problems
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from tests.support.engines.engines import PLUGIN, SGLANG, sglang_is_installed
from tests.support.processes.ports import free_port
from tests.support.processes.processes import alive
from trainer import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.integration
ROWS = [
    {"prompt": [{"role": "user", "content": problem.question}]}
    for problem in islice(problems("train"), 12)
]


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(completion[0]["content"]) / 50 for completion in completions]


def config(folder: Path, **fields: Any) -> GRPOConfig:
    small = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "use_cpu": True,
    }
    return GRPOConfig(output_dir=folder / "run", verbose=False, **small | {"max_steps": 2} | fields)


@contextlib.contextmanager
def served(directory: Path, asked: Counter[str]) -> Iterator[str]:
    """Serves an engine with SGLang's API on a port of this machine; `asked` counts its calls by URL
    and path."""
    app = make_app(Engine(Model(directory, 256, torch.device("cpu"), dtype="float32"), seed=0))

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked[url + scope["path"]] += 1
        await app(scope, receive, send)

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = uvicorn.Server(uvicorn.Config(counting, "127.0.0.1", port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


def test_servers_share_the_prompts_and_get_every_version(base_model: Path, tmp_path: Path) -> None:
    asked: Counter[str] = Counter()
    with served(base_model, asked) as first, served(base_model, asked) as second:
        result = GRPOTrainer(
            str(base_model), length, config(tmp_path), ROWS, engine=[first, f"{second}/"]
        ).train()
    assert result.global_step == 2
    assert all(
        line["update"]["delta_logprob"] < 1e-4 for line in result.history
    )  # both servers got every version
    assert (
        asked[first + "/update_weights_from_disk"]
        == asked[second + "/update_weights_from_disk"]
        == 3
    )
    assert asked[first + "/generate"] > 0
    assert asked[second + "/generate"] > 0


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ("vllm", {}, r"this is not an engine.*field: engine.*value: vllm.*sglang, or the URLs"),
        (["http://a:1", "http://a:1/"], {}, r"this server is named twice.*value: http://a:1"),
        ("http://a:1", {"lora.rank": 4}, r"may not accept adapters.*lora.publish"),
        (
            "embedded",
            {"rollout.engine_args": []},
            r"SGLang server that the trainer itself starts.*engine='sglang'",
        ),
        (
            "sglang",
            {"rollout.engine_python": "no/python"},
            r"this Python does not have sglang.*rollout.engine_python.*no/python",
        ),
    ],
)
def test_an_impossible_engine_is_refused_at_once(
    engine: Any, settings: dict[str, Any], message: str, base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(
            str(base_model), length, config(tmp_path, settings=settings), ROWS, engine=engine
        )


def test_a_quiet_run_warns_of_a_server_that_it_waits_for(
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer.build.wait_healthy", partial(wait_healthy, every_s=0.1))
    url = f"http://127.0.0.1:{free_port()}"
    settings = config(tmp_path, settings={"limits.stuck_after_s": 1.0})
    with pytest.raises(Unreachable, match=f"not healthy after 1 s without progress: .* at {url}"):
        GRPOTrainer(str(base_model), length, settings, ROWS, engine=url).train()
    assert any(
        url in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    )


def test_an_sglang_that_does_not_start_ends_the_run_with_its_output(
    base_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such kernel\nexit 3\n")
    broken.chmod(0o755)
    settings = config(tmp_path, settings={"rollout.engine_python": str(broken)})
    trainer = GRPOTrainer(str(base_model), length, settings, ROWS, engine="sglang")
    with pytest.raises(
        ServiceError, match=r"(?s)engine failed to start.*status 3.*no such kernel.*engine.log"
    ):
        trainer.train()


ENDING = """
import http.server, os, pathlib, sys

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        print("no such memory", flush=True)
        os._exit(3)

started = pathlib.Path(__file__).with_name("started")
if started.exists():
    sys.exit("no memory at all")
started.touch()
address = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(address, Engine).serve_forever()
"""


def test_an_sglang_that_does_not_start_again_ends_the_run_while_it_publishes(
    base_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "engine.py").write_text(ENDING)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/engine.py "$@"\n')
    script.chmod(0o755)
    settings = config(tmp_path, settings={"rollout.engine_python": str(script)})
    trainer = GRPOTrainer(str(base_model), length, settings, ROWS, engine="sglang")
    with pytest.raises(
        ServiceLost, match=r"(?s)engine failed to start.*status 1.*no memory at all.*engine.log"
    ):
        trainer.train()


class Killed:
    """Kills the engine once, after the first step."""

    def __init__(self) -> None:
        self.servers: set[int] = set()
        self.family: list[psutil.Process] = []

    def on_step_end(self, state: Any) -> None:
        family = psutil.Process().children(recursive=True)
        (server,) = [
            each
            for each in family
            if "sglang.launch_server" in each.cmdline() and "-S" not in each.cmdline()
        ]
        self.servers.add(server.pid)
        self.family += [server, *server.children(recursive=True)]
        if state.global_step == 1:
            server.kill()


@pytest.mark.slow
@pytest.mark.skipif(
    not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
)
@pytest.mark.parametrize("lora", [{}, {"lora.rank": 4}], ids=["whole", "adapter"])
def test_real_sglang_is_started_restarted_and_ended(
    lora: dict[str, Any], base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    own = {
        "rollout.engine_python": str(SGLANG / "bin" / "python"),
        "rollout.max_running_requests": 16,
        **lora,
    }
    killed = Killed()
    settings = config(tmp_path, max_steps=3, learning_rate=1e-3, settings=own)
    trainer = GRPOTrainer(
        str(base_model), length, settings, ROWS, ROWS[:2], callbacks=[killed], engine="sglang"
    )
    result = trainer.train()
    assert result.global_step == 3
    assert all(line["update"]["delta_logprob"] < 1e-3 for line in result.history)
    assert len(result.evaluations) == 2
    assert len(killed.servers) == 2
    assert [each for each in killed.family if alive(each.pid)] == []
