"""The node's engine: its command line and its control calls. Both engines have SGLang's HTTP
API.
"""

import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from common import Json
from common.clients.base import Client
from common.clients.rollout import OTHER_ENGINE
from common.errors import ConfigError, ServiceError, shorten
from common.models.hub import text_config
from common.models.rotary import is_dynamic, switch_length
from common.process.security import tls
from common.process.topology import ROLLOUT, TINKER, Topology
from common.settings.config import Config
from common.settings.sections import RolloutSection
from common.wire.schemas import EngineLibraries, WeightManifest, adapter_name
from services.rollout.api_key_launcher import run_module

log = logging.getLogger(__name__)
_ENV = {
    # Otherwise SGLang's /health generates a token, and a paused engine looks dead to router and
    # agent.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # In a log, a progress bar would be one endless line.
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_CPU_ENV = {
    "SGLANG_PLATFORM": "torch_cpu",  # jobgroup/sglang-cpu/plugin
    # SGLang's own CPU platform needs operators that have no CPU build
    "SGLANG_USE_CPU_ENGINE": "0",
    # Kernels of linear layers exist in Triton alone, which compiles for GPUs only.
    "TRITON_INTERPRET": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
_CPU_OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.3,
    "skip-server-warmup": True,
    "sleep-on-idle": True,  # otherwise the idle scheduler keeps a core busy
    "mamba-radix-cache-strategy": "no_buffer",  # the only one for a CPU, without overlap
    "disable-overlap-schedule": True,
    "enable-fp32-lm-head": False,  # everything is float32
    "moe-runner-backend": None,
}
# Model types whose attention windows SGLang 0.5.21 ignores: every token attends to all earlier
# tokens.
_WITHOUT_WINDOWS = ("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

TINKER_ADAPTERS = 8
"""Adapters that an engine of a tinker-server keeps."""
_LIBRARIES = "import torch; print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())))"
# Limit for the import of torch, which a disk may make slow.
_IMPORT_S = 300.0


class LoadFailed(ServiceError):
    """The engine did not load new weights (502)."""

    status = 502
    code = "load_failed"


def first_node(config: Config, topology: Topology) -> int:
    """Returns the rank of the first node of this node's engine."""
    return topology.node_rank - topology.node_rank % config.rollout.nodes_per_engine


def engine_command(
    config: Config,
    topology: Topology,
    model_path: str,
    weight_version: str,
    *,
    dist_init_addr: str = "",
) -> list[str]:
    """Returns the command line of this node's engine, or of its process of an engine that is larger
    than a node; the processes of one find each other at `dist_init_addr`.

    Raises ConfigError when `rollout.engine_python` is missing, or the nodes cannot be divided into
    engines.
    """
    rollout = config.rollout
    nodes = rollout.nodes_per_engine
    if topology.num_nodes % nodes:
        raise ConfigError(
            f"the {topology.num_nodes} nodes of rollout-server cannot be divided into engines of "
            f"{nodes} nodes",
            field="rollout.nodes_per_engine",
            value=nodes,
            remedy=f"set num_nodes of rollout-server to a multiple of {nodes}",
        )
    host, port = topology.bind(ROLLOUT, rollout.engine_port)
    # Engines must sample different answers, and the nodes of one the same.
    first = first_node(config, topology)
    seed = config.seed * topology.num_nodes + first
    options: dict[str, object] = {
        "model-path": model_path,
        "host": host,
        "port": port,
        "weight-version": weight_version,
        "max-running-requests": rollout.max_running_requests,
        "dtype": config.model.dtype,
        "enable-fp32-lm-head": config.model.fp32_head,
        "enable-deterministic-inference": config.reproducible,
    }
    if rollout.engine == "embedded":
        options |= {
            "max-context-tokens": rollout.max_context_tokens,
            "seed": seed,
            "device": rollout.device,
        }
        return [sys.executable, "-m", "services.engine", *to_options(options)]

    options["random-seed"] = seed
    if nodes > 1:
        options |= {
            "nnodes": nodes,
            "node-rank": topology.node_rank - first,
            "dist-init-addr": dist_init_addr,
        }
    options |= _sglang_options(config, model_path)
    command = run_module(str(_sglang_python(rollout)), "sglang.launch_server")
    # The operator's own arguments come last, so that they win.
    return [*command, *to_options(options), *rollout.engine_args]


def _sglang_options(config: Config, model_path: str) -> dict[str, object]:
    """Returns the options that only SGLang has, or has with another value."""
    rollout = config.rollout
    files = tls()
    options: dict[str, object] = {
        "tp-size": rollout.tensor_parallel_size,
        "load-format": "safetensors",  # never a pickle
        "context-length": _sglang_context_length(config, model_path),
        "ssl-certfile": files.certificate or None,
        "ssl-keyfile": files.key or None,
        "enable-metrics": True,
        "log-level-http": "warning",  # or it logs every request of a run
        "enable-memory-saver": rollout.colocate,
        "trust-remote-code": config.model.trust_remote_code,
        "enable-return-routed-experts": config.trainer.routing_replay,
    }
    # Other kernels, which SGLang may prefer, choose the experts themselves and record nothing, or
    # rearrange them in memory, so that the checksums of a broadcast are not those that were sent.
    if config.trainer.routing_replay or config.trainer.weight_sync == "distributed":
        options["moe-runner-backend"] = "triton"
    if rollout.device == "cpu":
        options |= _CPU_OPTIONS
        options["max-total-tokens"] = rollout.max_running_requests * rollout.max_context_tokens
    if config.lora.publishes_adapter:
        options |= {
            "enable-lora": True,
            "lora-strict-loading": True,
            "lora-backend": "torch_native" if rollout.device == "cpu" else None,
            "max-lora-rank": config.lora.rank,
            # The model without an adapter counts as one.
            "max-loras-per-batch": adapters_kept(config) + 1,
            "lora-target-modules": config.lora.target_modules or ["all"],
            # Otherwise SGLang computes the shared experts of some mixtures with the routed ones,
            # and drops their part of an adapter.
            "disable-shared-experts-fusion": True,
        }
    return options


def engine_libraries(config: Config) -> EngineLibraries | None:
    """Asks the engine's own Python for the versions of its libraries; None where no weights are
    sent over NCCL. Takes the seconds that torch takes to import.

    Raises ConfigError when it has no torch, or a torch without NCCL.
    """
    rollout = config.rollout
    if config.trainer.weight_sync != "distributed" or not rollout.is_sglang_on_gpus:
        return None
    python = str(_sglang_python(rollout))
    try:
        asked = subprocess.run(
            [python, "-c", _LIBRARIES],
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=True,
        )
        torch, nccl = asked.stdout.split()
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise ConfigError(
            "this Python reports no version of NCCL, which sends the weights: "
            + shorten(str(said).strip().rpartition("\n")[2]),
            field="rollout.engine_python",
            value=python,
            remedy="install the CUDA build of torch there (`bash jobgroup/setup.sh sglang`), "
            "or set trainer.weight_sync http",
        ) from None
    return EngineLibraries(torch=torch, nccl=nccl)


def engine_env(config: Config) -> dict[str, str]:
    """Returns the variables to add to the engine's environment."""
    rollout = config.rollout
    if rollout.engine == "embedded":
        return _ENV
    if rollout.device != "cpu":
        toolkit = toolkit_env(Path(rollout.engine_python), os.environ)
        return _ENV | rollout.nccl_env() | toolkit

    env = _ENV | _CPU_ENV
    if rollout.gpus_per_engine > 1:
        # SGLang wants to know the cores of every process; without its compiled operators it only
        # counts the entries.
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * rollout.gpus_per_node)
    if Path(config.model.name).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # else it asks the hub anyway
    return env


def toolkit_env(python: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that point SGLang to ninja and nvcc in its own environment, which it
    compiles kernels with.

    A CUDA toolkit named by `env` is kept. Otherwise the toolkit of the wheels is used, which
    `jobgroup/setup.sh` completes; without these wheels SGLang looks for the system's toolkit.
    """
    programs = python.absolute().parent
    wheels = sorted(programs.parent.glob("lib/python3*/site-packages/nvidia/cu*/bin/nvcc"))
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if not home and wheels:
        home = str(wheels[-1].parents[1])

    path = env.get("PATH", os.defpath)
    if not home:
        return {"PATH": os.pathsep.join((str(programs), path))}
    return {"PATH": os.pathsep.join((str(programs), f"{home}/bin", path)), "CUDA_HOME": home}


def _sglang_python(rollout: RolloutSection) -> Path:
    # Not resolved: the symlink identifies the virtual environment.
    python = Path(rollout.engine_python).absolute()
    if not python.is_file():
        install = "install sglang in a separate environment"
        if rollout.device == "cpu":
            install = "run make sglang-cpu"
        raise ConfigError(
            "this Python does not have sglang",
            field="rollout.engine_python",
            value=str(python),
            remedy=f"{install} and name its Python here, or set rollout.engine=embedded",
        )
    return python


def _sglang_context_length(config: Config, model_path: str) -> int | None:
    """Returns the context length to give SGLang: up to which it computes a model as transformers
    does. None for the model's own.

    Raises ConfigError for a model that it computes differently at any length, and when completions
    can be longer.
    """
    model_config = text_config(model_path)
    if is_dynamic(model_config):
        raise ConfigError(
            "SGLang gives dynamic rotary positions other frequencies than transformers",
            field="model.name",
            value=model_path,
            remedy="set rollout.engine=embedded, or use another model",
        )
    # The platform for CPUs corrects it.
    if model_config.get("model_type") == "granitemoehybrid" and config.rollout.device != "cpu":
        raise ConfigError(
            "SGLang 0.5.21 adds the input of this model's last MLP twice, and would sample from "
            "another policy",
            field="model.name",
            value=model_path,
            remedy="set rollout.engine=embedded, or use another model",
        )
    reasons: dict[int, str] = {}
    window = model_config.get("sliding_window")
    ignores_windows = model_config.get("model_type") in _WITHOUT_WINDOWS
    if window and ignores_windows and model_config.get("use_sliding_window", True):
        reasons[window] = f"SGLang ignores the attention window of this model, {window} tokens"
    switches_at = switch_length(model_config)
    if switches_at:
        reasons[switches_at] = (
            "SGLang changes the LongRoPE factors of a whole batch "
            f"when a sequence of it exceeds {switches_at} tokens"
        )
    if not reasons:
        return None

    tokens = min(reasons)
    lengths = {
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "evaluation.max_new_tokens": config.evaluation.max_new_tokens or 0,
    }
    for field, length in lengths.items():
        if length >= tokens:
            raise ConfigError(
                f"{reasons[tokens]}, and completions can be longer",
                field=field,
                value=length,
                remedy=f"lower it to less than {tokens}, or set rollout.engine=embedded",
            )
    return tokens


def adapters_kept(config: Config) -> int:
    """Returns the number of adapters to keep on an engine: the newest, and those that requests may
    still name.
    """
    if config.rollout.trainer == TINKER:
        return TINKER_ADAPTERS
    return config.trainer.max_staleness + 2


def released_memory(config: Config) -> list[str]:
    """Returns the kinds of memory (SGLang's tags) that a sleeping engine releases; none when it has
    its own GPUs.

    Released weights lose their values, which the next version restores. An adapter cannot restore
    its base model, so with adapters the weights stay.
    """
    if not config.rollout.colocate:
        return []
    return ["kv_cache"] if config.lora.publishes_adapter else ["kv_cache", "weights"]


def to_options(options: Mapping[str, object]) -> list[str]:
    """Returns the options as command-line words: `--name value`, for a list with all its values,
    for True without one; nothing for None and False.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(str(value))
    return words


class _Info(BaseModel):
    weight_version: str


class _RankPlace(BaseModel):
    tp_rank: int


class _RankSums(BaseModel):
    checksums: dict[str, str]
    parallelism_info: list[_RankPlace] = []
    """Set where each group of data-parallel attention answers for all ranks."""


class _Sums(BaseModel):
    ranks: list[_RankSums]


class _Card(BaseModel):
    id: str
    root: str
    parent: str | None = None
    """The model that an adapter belongs to."""


class _Cards(BaseModel):
    data: list[_Card]


class EngineClient(Client):
    """Client for the control calls of one engine, sent directly because the router does not forward
    them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asleep: list[str] = []
        """The kinds of memory that the engine has released."""
        self.is_paused = False
        """Whether this client has paused it."""
        self.confirmed: str | None = None
        """The label that it has confirmed; None from the beginning of the next load on."""

    async def weight_version(self) -> str:
        """Returns the label of the weights that the engine serves. Raises ServiceError."""
        return (await self.json("GET", "/model_info", _Info, deadline_s=30)).weight_version

    async def load(
        self, directory: Path, version: str, timeout_s: float, whole: bool = True
    ) -> None:
        """Replaces the weights; running requests pause and continue with the new weights. A
        sleeping engine wakes up.

        Raises LoadFailed or ServiceError when the engine does not confirm the version. Before that
        it resumes with the old weights, unless it holds only part of a version (`whole` false) or
        was asleep.
        """
        try:
            if not self.asleep:
                await self.pause()
            await self._wake("weights", timeout_s)

            await self.request(
                "POST",
                "/update_weights_from_disk",
                json={"model_path": str(directory), "weight_version": version, "flush_cache": True},
                deadline_s=timeout_s,
            )
            await self._wake("kv_cache", timeout_s)  # only now, because loading needs extra memory
        except ServiceError:
            if whole and not self.asleep:
                await self.resume()
            raise

        await self.resume()
        await self.confirm(version)

    async def load_version(
        self,
        manifest: WeightManifest,
        directory: Path,
        *,
        keep: int,
        timeout_s: float,
        whole: bool = True,
    ) -> None:
        """Loads a model, or an adapter, of which it keeps the newest `keep`. `timeout_s` limits
        only the call for an adapter. That for a model may take minutes, and has no limit here: the
        caller cancels it when the engine makes no progress.
        """
        if manifest.kind == "adapter":
            await self.load_adapter(directory, manifest, keep=keep, timeout_s=timeout_s)
        else:
            await self.load(directory, str(manifest.version), math.inf, whole)

    async def pause(self) -> None:
        """Stops generating; requests wait. Raises ServiceError."""
        self.is_paused = True
        self.confirmed = None
        await self.request("POST", "/pause_generation", json={"mode": "retract"}, deadline_s=60)

    async def sleep(self, memory: list[str], timeout_s: float) -> None:
        """Pauses the engine and releases these kinds of memory; requests wait.

        Raises ServiceError when the engine may still hold the memory.
        """
        await self.pause()
        await self.control("/release_memory_occupation", {"tags": memory}, timeout_s)
        self.asleep = list(memory)

    async def _wake(self, memory: str, timeout_s: float) -> None:
        """Makes the engine allocate one kind of memory again, if released: SGLang would crash if
        asked twice.
        """
        if memory in self.asleep:
            await self.control("/resume_memory_occupation", {"tags": [memory]}, timeout_s)
            self.asleep.remove(memory)

    async def resume(self) -> None:
        """Continues generating. Raises ServiceError."""
        await self.request("POST", "/continue_generation", json={}, deadline_s=60)
        self.is_paused = False

    async def control(self, path: str, body: Json, timeout_s: float) -> None:
        """Sends one call without retries, because a second broadcast would have no sender.

        Raises LoadFailed when the engine refuses or does not answer.
        """
        try:
            response = await self.http.post(path, json=body, timeout=timeout_s)
        except (httpx.TransportError, OSError) as error:
            raise LoadFailed(
                f"the engine did not answer {path}: {error or type(error).__name__}",
                field=path,
                remedy=OTHER_ENGINE,
            ) from None
        if not response.is_success:
            raise LoadFailed(
                f"the engine refused {path}: {shorten(response.text)}",
                field=path,
                remedy=OTHER_ENGINE,
            )

    async def checksums(self, timeout_s: float) -> list[dict[str, str]]:
        """Returns, for each process of the engine in the order of their ranks, the checksums of all
        tensors by their names in the engine. Raises ServiceError.
        """
        found = await self.json(
            "POST", "/weights_checker", _Sums, json={"action": "checksum"}, deadline_s=timeout_s
        )
        by_rank: dict[int, dict[str, str]] = {}
        for index, rank in enumerate(found.ranks):
            place = rank.parallelism_info
            by_rank[place[0].tp_rank if place else index] = rank.checksums
        return [by_rank[number] for number in sorted(by_rank)]

    async def confirm(self, version: str) -> None:
        """Raises LoadFailed unless the engine serves this version."""
        served = await self.weight_version()
        if served != version:
            raise LoadFailed(
                f"the engine serves weights {served} instead of {version}",
                field="weight_version",
                value=served,
                remedy=OTHER_ENGINE,
            )
        self.confirmed = version

    async def strayed_to(self) -> str | None:
        """Returns the label of the weights that the engine serves instead of those that it has
        confirmed, once: a copy of an earlier call, held back on its way, may have loaded them. None
        if it serves those, or is to load others. Raises ServiceError.
        """
        confirmed = self.confirmed
        if confirmed is None:
            return None
        served = await self.weight_version()
        # A load that has begun meanwhile decides what it serves.
        if served == confirmed or self.confirmed != confirmed:
            return None
        self.confirmed = None
        return served

    async def load_adapter(
        self, directory: Path, manifest: WeightManifest, keep: int, timeout_s: float
    ) -> None:
        """Loads the adapter in `directory` without a pause, and unloads all but the newest `keep`
        of its run.

        An adapter's name contains its run and version, so it never refers to other weights: a
        request keeps its adapter to the end, and a request for an unloaded adapter is refused
        (400). The engine's version label stays that of the model it started with. Unloading waits
        for requests that use the adapter. Raises LoadFailed or ServiceError when the engine
        refuses.
        """
        if self.asleep:
            await self._wake("kv_cache", timeout_s)
            await self.resume()

        name = adapter_name(manifest.run_id, manifest.version)
        loaded = await self.adapters()
        if name not in loaded:
            body = {"lora_name": name, "lora_path": str(directory)}
            loaded = await self.change_adapters("/load_lora_adapter", body, timeout_s, wanted=True)
            if loaded.get(name) != str(directory):
                raise LoadFailed(
                    f"the engine has the adapters {sorted(loaded)}, not {name}",
                    field="lora_name",
                    value=name,
                    remedy=OTHER_ENGINE,
                )

        of_this_run = sorted(other for other in loaded if other.startswith(f"{manifest.run_id}-v"))
        kept = {name, *of_this_run[-keep:]}
        for other in sorted(loaded.keys() - kept):
            body = {"lora_name": other}
            await self.change_adapters("/unload_lora_adapter", body, timeout_s, wanted=False)

    async def change_adapters(
        self, path: str, body: dict[str, str], timeout_s: float, wanted: bool
    ) -> dict[str, str]:
        """Returns the adapters after a call.

        A refusal is not an error if an earlier attempt, whose response was lost, worked.
        """
        try:
            await self.request("POST", path, json=body, deadline_s=timeout_s)
        except ServiceError:
            loaded = await self.adapters()
            if (body["lora_name"] in loaded) != wanted:
                raise
            return loaded
        return await self.adapters()

    async def adapters(self) -> dict[str, str]:
        """Returns the directories of the loaded LoRA adapters by name."""
        cards = (await self.json("GET", "/v1/models", _Cards, deadline_s=30)).data
        return {card.id: card.root for card in cards if card.parent is not None}
