"""This node's engine: the command that starts it and the calls that load weights. Both engines speak SGLang's HTTP API."""

import logging
import sys
from pathlib import Path
from typing import Any

import httpx

from common.clients import Client
from common.config import Config
from common.errors import ConfigError, ServiceError, shorten
from common.sections import RolloutSection
from common.security import tls
from common.topology import ROLLOUT, Topology
from services.rollout.keyed import run_module

log = logging.getLogger(__name__)
_ENV = {
    # SGLang's /health generates a token otherwise, so a paused engine would look dead to router and agent.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Its output is a pipe and goes to logs: a progress bar would be one endless line.
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_CPU_ENV = {
    "SGLANG_PLATFORM": "torch_cpu",  # jobgroup/sglang-cpu/plugin
    "SGLANG_USE_CPU_ENGINE": "0",  # SGLang's own CPU platform needs operators that have no CPU build
}
_CPU_OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.3,
}
_CPU_FLAGS = ("--skip-server-warmup", "--sleep-on-idle")
"""Idle, the scheduler would keep a core busy."""


class LoadFailed(ServiceError):
    """The engine did not take new weights."""

    status = 502
    code = "load_failed"


def engine_command(config: Config, topology: Topology, model_path: str, weight_version: str) -> list[str]:
    """The command line of this node's engine.

    Raises ConfigError when `rollout.engine_python` is needed and not there, or a setting cannot be used on a CPU.
    """
    rollout = config.rollout
    host, port = topology.bind(ROLLOUT, rollout.engine_port)
    seed = config.seed * topology.num_nodes + topology.node_rank  # nodes must not sample the same answers
    common = {
        "model-path": model_path,
        "host": host,
        "port": port,
        "weight-version": weight_version,
        "max-running-requests": rollout.max_running_requests,
    }
    if rollout.engine == "embedded":
        options = {**common, "max-context-tokens": rollout.max_context_tokens, "seed": seed}
        return [sys.executable, "-m", "services.engine", *_words(options)]
    on_cpu = rollout.device == "cpu"
    options = {
        **common,
        "tp-size": rollout.tensor_parallel_size,
        "random-seed": seed,
        "dtype": config.model.dtype,
        "load-format": "safetensors",  # never a pickle
    }
    if on_cpu:
        options |= _CPU_OPTIONS | {"max-total-tokens": rollout.max_running_requests * rollout.max_context_tokens}
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    flags = ["--enable-metrics", *(_CPU_FLAGS if on_cpu else ()), *trust, *_lora_words(config), *rollout.engine_args]
    tls_options = {"ssl-certfile": files.certificate, "ssl-keyfile": files.key} if (files := tls()).certificate else {}
    return [*run_module(str(_sglang_python(rollout)), "sglang.launch_server"), *_words(options | tls_options), *flags]


def engine_env(config: Config) -> dict[str, str]:
    """What is added to the environment of this node's engine."""
    if config.rollout.engine == "embedded" or config.rollout.device != "cpu":
        return _ENV
    offline = {"HF_HUB_OFFLINE": "1"} if Path(config.model.name).is_dir() else {}  # it would ask the hub for local models too
    return _ENV | _CPU_ENV | offline


def _sglang_python(rollout: RolloutSection) -> Path:
    if rollout.device == "cpu" and rollout.tensor_parallel_size > 1:
        raise ConfigError(
            "an engine on a CPU is one process",
            field="rollout.tensor_parallel_size",
            value=rollout.tensor_parallel_size,
            remedy="set it to 1, or rollout.device=cuda",
        )
    python = Path(rollout.engine_python).absolute()  # not resolved: a virtual environment is found by its link
    if not python.is_file():
        install = "run make sglang-cpu" if rollout.device == "cpu" else "install sglang in an environment of its own"
        raise ConfigError(
            "there is no Python with sglang",
            field="rollout.engine_python",
            value=str(python),
            remedy=f"{install} and name its Python here, or set rollout.engine=embedded",
        )
    return python


def _lora_words(config: Config) -> list[str]:
    """SGLang serves adapters only when it is told so, and of what size, at its start."""
    if not config.lora.publishes_adapter:
        return []
    options = {
        "max-lora-rank": config.lora.rank,
        "max-loras-per-batch": adapters_kept(config) + 1,  # the model without an adapter counts as one
        **({"lora-backend": "torch_native"} if config.rollout.device == "cpu" else {}),
    }
    targets = config.lora.target_modules or ["all"]
    return ["--enable-lora", "--lora-strict-loading", *_words(options), "--lora-target-modules", *targets]


def adapters_kept(config: Config) -> int:
    """Adapters that an engine has at a time: the newest, and those that requests within `max_staleness` may still name."""
    return config.trainer.max_staleness + 2


def _words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


class EngineClient(Client):
    """The control calls of one engine; never through the router, which does not forward them."""

    async def weight_version(self) -> str:
        """What the engine says it serves."""
        return str(_field(await self.request("GET", "/model_info", deadline_s=30), "weight_version"))

    async def load(self, directory: Path, version: str, timeout_s: float, whole: bool = True) -> None:
        """Replaces the weights under running requests: they wait, and go on with the new ones.

        Raises LoadFailed or ServiceError when the engine does not confirm the version; it is told to continue first, unless
        it does not hold a whole version (`whole` false).
        """
        try:
            await self.pause()
            body = {"model_path": str(directory), "weight_version": version, "flush_cache": True}
            response = await self.request("POST", "/update_weights_from_disk", json=body, deadline_s=timeout_s)
            if _field(response, "success") is not True:
                raise LoadFailed(f"the engine did not load weights {version}: {shorten(response.text)}")
        except ServiceError:
            if whole:
                await self.resume()
            raise
        await self.resume()
        await self.confirm(version)

    async def pause(self) -> None:
        """Requests wait from here on, those that run too."""
        await self.request("POST", "/pause_generation", json={"mode": "retract"}, deadline_s=60)

    async def resume(self) -> None:
        """They go on."""
        await self.request("POST", "/continue_generation", json={}, deadline_s=60)

    async def control(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """One call, never repeated: a second broadcast would wait for what nobody sends.

        Raises LoadFailed when the engine refuses, or does not answer.
        """
        try:
            response = await self.http.post(path, json=body, timeout=timeout_s)
        except (httpx.TransportError, OSError) as error:
            raise LoadFailed(f"the engine did not answer {path}: {error or type(error).__name__}") from None
        if not response.is_success or _field(response, "success") is not True:
            raise LoadFailed(f"the engine refused {path}: {shorten(response.text)}")

    async def checksums(self, timeout_s: float) -> list[dict[str, str]]:
        """Of every tensor, by its name in the engine, for each of its GPUs. Raises ServiceError."""
        response = await self.request("POST", "/weights_checker", json={"action": "checksum"}, deadline_s=timeout_s)
        try:
            return [dict(rank["checksums"]) for rank in response.json()["ranks"]]
        except (ValueError, KeyError, TypeError):
            raise LoadFailed(f"the engine's answer has no checksums: {shorten(response.text)}") from None

    async def confirm(self, version: str) -> None:
        """Raises LoadFailed when the engine serves another version."""
        served = await self.weight_version()
        if served != version:
            raise LoadFailed(f"the engine serves weights {served} instead of {version}", field="weight_version", value=served)


def _field(response: httpx.Response, name: str) -> object:
    """A field of the engine's answer. Raises LoadFailed when the answer is something else."""
    try:
        value: object = response.json()[name]
    except (ValueError, KeyError, TypeError):
        text = shorten(response.text)
        raise LoadFailed(f"the engine's answer to {response.url.path} has no {name}", field=name, value=text) from None
    return value
