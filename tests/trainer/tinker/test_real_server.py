"""The real server as a process: with the SDK of Tinker, and killed at random moments."""

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.paths import ROOT
from trainer.audit.__main__ import main as audit
from trainer.tinker.messages import MESSAGES
from trainer.tinker.store import TinkerStore

pytestmark = pytest.mark.integration
MODEL = "tiny/base"


class Server:
    """A server of the tiny model."""

    def __init__(self, directory: Path, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "trainer.tinker", "--model", str(model)]
        self._command += ["--dir", str(directory), "--name", MODEL, "--port", str(self.port)]
        self._log = directory.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def post(self, call: str, content: bytes = b"", **body: Any) -> httpx.Response:
        """Sends a call until it is answered, as the SDK does."""
        kind = "application/x-protobuf" if content else "application/json"
        content = content or json.dumps(body).encode()
        while True:
            process = self._process  # None while it is killed
            assert process is None or process.poll() is None, self._log.read_text()
            try:
                answer = httpx.post(
                    f"{self.url}/api/v1/{call}",
                    content=content,
                    headers={"content-type": kind},
                    timeout=60,
                )
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            if answer.status_code not in (408, 429, 503):
                assert answer.is_success, answer.text
                return answer

    def result(self, accepted: httpx.Response) -> httpx.Response:
        return self.post("retrieve_future", request_id=accepted.json()["request_id"])


@contextmanager
def _serving(directory: Path, model: Path) -> Iterator[Server]:
    server = Server(directory, model)
    try:
        yield server
    finally:
        server.kill()


def _pass(run: str, seq: int, tokens: list[int], targets: list[int], logprobs: bytes) -> bytes:
    inputs = {
        "target_tokens": (np.array(targets, "<i8").tobytes(), 2),
        "logprobs": (logprobs, 1),
        "advantages": (np.linspace(-1, 1, len(targets)).astype("<f4").tobytes(), 1),
    }
    tensors = [
        {"key": name, "value": {"dense": content, "dtype": dtype, "shape": [len(targets)]}}
        for name, (content, dtype) in inputs.items()
    ]
    text = {"tokens": np.array(tokens, "<i4").tobytes()}
    data = [{"model_input": [{"text": text}], "inputs": tensors}]
    loss = "importance_sampling"
    return MESSAGES.encode("Pass", {"run": run, "seq": seq, "data": data, "loss": loss})


def _loop(server: Server, steps: int) -> list[bytes]:
    """Samples, and learns from the samples; returns all answers."""
    session = server.post("create_session", tags=[]).json()["session_id"]
    made = server.post(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model=MODEL,
        lora_config={"rank": 4},
    )
    run = server.result(made).json()["model_id"]
    found: list[bytes] = []
    for step in range(steps):
        seq = 3 * step + 1
        saved = server.post(
            "save_weights_for_sampler", model_id=run, seq_id=seq, sampling_session_seq_id=step
        )
        sampler = server.result(saved).json()["sampling_session_id"]
        prompt = [1, 5 + step]
        asked = server.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=0,
            prompt={"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            sampling_params={"max_tokens": 6, "stop": []},
        )
        sampled = server.result(asked).content
        (sequence,) = MESSAGES.decode("Samples", sampled)["sequences"]
        tokens = np.frombuffer(sequence["tokens"], "<i4").tolist()
        body = _pass(
            run,
            seq + 1,
            [prompt[-1], *tokens[:-1]],
            tokens,
            logprobs=sequence["logprobs"],
        )
        passed = server.post("forward_backward", body)
        stepped = server.post(
            "optim_step", model_id=run, seq_id=seq + 2, adam_params={"learning_rate": 1e-2}
        )
        found += [sampled, server.result(passed).content, server.result(stepped).content]
    last = server.post("save_weights", model_id=run, seq_id=3 * steps + 1, path="last")
    server.result(last)
    return found


def _weights(directory: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(directory.glob("runs/*/weights-*/*.safetensors"))]


def test_kills_at_random_moments_change_nothing(base_model: Path, tmp_path: Path) -> None:
    with _serving(tmp_path / "whole", base_model) as server:
        expected = _loop(server, steps=8)
        assert server.stop() == 0
    kills = int(os.environ.get("TINKER_KILLS", "3"))
    chance = random.Random(0)
    with _serving(tmp_path / "killed", base_model) as server:
        found = _with_kills(server, kills, chance)
        assert server.stop() == 0
    assert found == expected
    weights = _weights(tmp_path / "whole")
    assert len(weights) == 2
    assert _weights(tmp_path / "killed") == weights

    assert _audit(tmp_path / "killed") == 0
    _change_an_answer(tmp_path / "killed")
    assert _audit(tmp_path / "killed") == 1


def _audit(directory: Path) -> object:
    with pytest.raises(SystemExit) as ended:
        audit([str(directory)])
    return ended.value.code


def _change_an_answer(directory: Path) -> None:
    """Changes a recorded norm of the gradient, with its checksum, as only an attacker would."""
    store = TinkerStore(directory / "tinker.sqlite")
    line = next(line for line in store.applied() if line.endswith(":train:0"))
    with store.transaction() as db:
        result = store.result(line, 3)
        assert result is not None
        changed = result.content.replace(b"}}", b"1}}")
        assert changed != result.content
        db.execute("DELETE FROM results WHERE line = ? AND seq = 3", (line,))
        store.finish(line, 3, replace(result, content=changed), repeatable=True)
    store.close()


def _with_kills(server: Server, kills: int, chance: random.Random) -> list[bytes]:
    answers: list[bytes] = []
    loop = threading.Thread(target=lambda: answers.extend(_loop(server, steps=8)))
    server.post("create_session", tags=[])  # it is up
    loop.start()
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 1.5))
        server.kill()
        server.start()
        server.post("create_session", tags=[])
    loop.join()
    return answers


def _sdk() -> str:
    """Returns a Python that has the SDK: this one, or that of TINKER_PYTHON."""
    named = os.environ.get("TINKER_PYTHON", "")
    if not named and importlib.util.find_spec("tinker") is None:
        pytest.skip("the SDK is not installed: name a Python that has it in TINKER_PYTHON")
    return named or sys.executable


def test_the_sdk_is_content(base_model: Path, tmp_path: Path) -> None:
    python = _sdk()
    script = ROOT / "tests" / "support" / "tinker" / "sdk_script.py"
    with _serving(tmp_path / "sdk", base_model) as server:
        server.post("create_session", tags=[])
        env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-W", "ignore", str(script), server.url, MODEL],
            capture_output=True,
            text=True,
            env=env,
            timeout=600,
            check=False,
        )
    assert "the SDK is content" in done.stdout, done.stdout + done.stderr
