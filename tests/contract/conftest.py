"""The targets of the contract: the embedded engine, the same behind the real router, and CONTRACT_URL when it is set."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, seed: int) -> Path:
    """A random Qwen2 with a tokenizer of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["Tom has 3 apples and buys 4 more apples."], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], log: Path, ready: Callable[[], bool]) -> subprocess.Popen[bytes]:
    """A process that is ready, or an error with its log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        if ready():
            return process
        time.sleep(0.1)
    end(process)
    raise AssertionError(f"{command} is not ready:\n{log.read_text()}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("contract") / "model", seed=0)


@pytest.fixture(scope="session")
def engine_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "services.rollout.embedded", "--model-path", str(model_dir), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--weight-version", "7", "--max-running-requests", "64", "--max-context-tokens", "256"]
    url = f"http://127.0.0.1:{port}"
    process = start([*command, "--seed", "0"], tmp_path_factory.mktemp("logs") / "engine.log", lambda: answers(f"{url}/health"))
    yield url
    end(process)


@pytest.fixture(scope="session")
def router_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", engine_url, "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
        "--policy",
        "round_robin",
        "--disable-circuit-breaker",
    ]
    url = f"http://127.0.0.1:{port}"
    process = start(command, tmp_path_factory.mktemp("logs") / "router.log", lambda: answers(f"{url}/readiness"))
    yield url
    end(process)


@pytest.fixture(params=["engine", "router", "external"])
def target(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of one target. CONTRACT_URL names a third one, such as a real SGLang that serves a ChatML model."""
    if request.param == "external":
        if not (url := os.environ.get("CONTRACT_URL", "")):
            pytest.skip("CONTRACT_URL is not set")
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture(params=["engine", "external"])
def worker(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of an engine itself, for the calls the router does not pass on."""
    if request.param == "external":
        if not (url := os.environ.get("CONTRACT_URL", "")):
            pytest.skip("CONTRACT_URL is not set")
    else:
        url = request.getfixturevalue("engine_url")
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client
