"""A random tiny model and the embedded engine as a real process, for the tests of the rollout interface."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
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
    pad, _, eos = special
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=CHAT_TEMPLATE)
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
    """A port that was free a moment ago."""
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
    """Ends a process, kindly first."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Whether a GET gives 2xx now."""
    try:
        return httpx.get(url, trust_env=False, timeout=5).is_success
    except httpx.TransportError:
        return False


@contextmanager
def engine_process(model: Path, log: Path, *extra: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`python -m services.rollout.embedded`; yields its URL and process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "services.rollout.embedded", "--model-path", str(model), "--host", "127.0.0.1"]
    process = start([*command, "--port", str(port), *extra], log, lambda: answers(f"{url}/health"))
    try:
        yield url, process
    finally:
        end(process)
