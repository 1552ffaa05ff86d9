"""A random tiny model, and both engines and the router as real processes, to test the rollout
interface."""

import contextlib
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from common.process import child
from common.process.topology import Topology
from common.settings.config import Config
from common.settings.sections import (
    LoraSection,
    ModelSection,
    RolloutSection,
    SamplingSection,
    TrainerSection,
)
from common.wire.schemas import Float32
from services.rollout.engine_client import engine_command, engine_env
from services.rollout.router import router_command
from tests.support.paths import ROOT
from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

_P = TypeVar("_P", "subprocess.Popen[bytes]", Forked)
SGLANG = ROOT / ".venv-sglang"
PLUGIN = ROOT / "jobgroup" / "sglang-cpu" / "plugin"
"""The plugin of this checkout, regardless of the one installed in that environment."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, seed: int) -> Path:
    """Writes a random Qwen2 with its own tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Tom has 3 apples and buys 4 more apples."], trainer)
    pad, _, eos = special
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=CHAT_TEMPLATE
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


def write_adapter(directory: Path, model: Path, seed: int) -> Path:
    """Writes a LoRA adapter of rank 4 that changes the model's output."""
    from peft import LoraConfig  # slow to import

    targets = [
        "q_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]  # SGLang needs the neighbours of some
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from PEFT, about transformers
        adapted = AutoModelForCausalLM.from_pretrained(model)
        adapted.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(directory)
    return directory


def expected_logprobs(
    model: Path, adapter: Path | None, prompt: Sequence[int], completion: Sequence[int]
) -> Float32:
    """Returns log-probabilities (nats) of the completion's tokens, computed by transformers and
    PEFT in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter)
    ids = torch.tensor([[*prompt, *completion]])
    with torch.inference_mode():
        scores = torch.log_softmax(loaded(ids).logits[0, len(prompt) - 1 : -1], dim=-1)
    found: Float32 = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found


def start(
    command: list[str],
    log: Path,
    ready: Callable[[], bool],
    *,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process and returns it once ready; raises an error with its log otherwise.

    The process leads a group and ends with this process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            child.command(command),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return _ready(process, log, ready)


def _ready(process: _P, log: Path, ready: Callable[[], bool]) -> _P:
    try:
        until(ready, log, process)
    except BaseException:
        end(process)
        raise
    return process


def end(process: "subprocess.Popen[bytes] | Forked") -> None:
    """Ends a process, first with SIGTERM, and kills everything it left behind."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()


def answers(url: str) -> bool:
    """Returns whether a GET is answered with 2xx now."""
    try:
        return httpx.get(url, trust_env=False, timeout=5).is_success
    except httpx.TransportError:
        return False


@contextmanager
def engine_process(
    model: Path, log: Path, *extra: str, port: int | None = None
) -> Iterator[tuple[str, Forked]]:
    """Runs `python -m services.engine`, on the CPU unless `extra` overrides it; yields its URL and
    process."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    words = [
        "--model-path",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        *extra,
    ]
    process = _ready(
        Forked("services.engine", *words, log=log), log, lambda: answers(f"{url}/health")
    )
    try:
        yield url, process
    finally:
        end(process)


def sglang_is_installed() -> bool:
    """Returns whether `make sglang-cpu` has completed here."""
    stamp = SGLANG / ".made-from"
    return stamp.is_file() and stamp.read_text().startswith("sglang-cpu ")


@contextmanager
def sglang_process(
    model: Path,
    log: Path,
    version: str,
    lora: LoraSection | None = None,
    max_new_tokens: int = 256,
    routing_replay: bool = False,
    **settings: Any,
) -> Iterator[str]:
    """Runs real SGLang on this CPU with the agent's command and environment; yields its URL.

    `settings` belong to the rollout section.
    """
    port = free_port()
    python = str(SGLANG / "bin" / "python")
    rollout = RolloutSection(
        device="cpu",
        engine_python=python,
        engine_port=port,
        max_running_requests=64,
        **settings,
    )
    sampling = SamplingSection(max_new_tokens=max_new_tokens)
    config = Config(
        model=ModelSection(name=str(model)),
        rollout=rollout,
        lora=lora or LoraSection(),
        sampling=sampling,
        trainer=TrainerSection(routing_replay=routing_replay),
    )
    command, url = (
        engine_command(config, Topology(), str(model), version),
        f"http://127.0.0.1:{port}",
    )
    env = engine_env(config) | Topology().loopback_env() | {"PYTHONPATH": str(PLUGIN)}
    process = start(command, log, lambda: answers(f"{url}/health"), env=env)
    try:
        yield url
    finally:
        end(process)


ROUTERS = ["sglang-router", pytest.param("smg", marks=pytest.mark.slow)]
"""Values of `rollout.router`."""


@contextmanager
def router_process(worker_url: str | Sequence[str], log: Path, **settings: Any) -> Iterator[str]:
    """Runs the real router with the agent's command line; yields its URL once it lists all engines
    as healthy.

    `settings` belong to the rollout section.
    """
    worker_urls = [worker_url] if isinstance(worker_url, str) else worker_url
    section = RolloutSection(
        **{"router_port": free_port(), "router_metrics_port": free_port(), **settings}
    )
    url = f"http://127.0.0.1:{section.router_port}"
    command = router_command(Config(rollout=section), Topology())
    process = start(command, log, lambda: answers(f"{url}/health"))
    try:
        for worker in worker_urls:
            httpx.post(
                f"{url}/workers", json={"url": worker}, trust_env=False, timeout=60
            ).raise_for_status()
        until(lambda: len(routed(url)) >= len(worker_urls), log, process)
        yield url
    finally:
        end(process)


def routed(router_url: str) -> set[str]:
    """Returns the engines to which the router sends requests."""
    workers = httpx.get(f"{router_url}/workers", trust_env=False, timeout=60).json()["workers"]
    return {worker["url"] for worker in workers if worker["is_healthy"]}
