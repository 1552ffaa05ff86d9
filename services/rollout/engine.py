"""This node's engine: the command that starts it and the calls that load weights. Both engines speak SGLang's HTTP API."""

import logging
import sys
from pathlib import Path

import httpx

from common.clients import Client
from common.config import Config
from common.errors import ConfigError, ServiceError, shorten
from common.topology import ROLLOUT, Topology

log = logging.getLogger(__name__)
BASE_VERSION = "default"
"""What SGLang calls the weights it was started with."""
ENGINE_ENV = {
    # SGLang's /health generates a token otherwise, so a paused engine would look dead to router and agent.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}


class LoadFailed(ServiceError):
    """The engine did not take new weights."""

    status = 502
    code = "load_failed"


def engine_command(config: Config, topology: Topology, model_path: str, weight_version: str) -> list[str]:
    """The command line of this node's engine.

    Raises ConfigError when `rollout.engine_python` is needed and not there.
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
        return [sys.executable, "-m", "services.rollout.embedded", *_words(options)]
    python = Path(rollout.engine_python).absolute()  # not resolved: a virtual environment is found by its link
    if not python.is_file():
        raise ConfigError(
            "there is no Python with sglang",
            field="rollout.engine_python",
            value=str(python),
            remedy="install sglang in an environment of its own and name its Python, or set rollout.engine=embedded",
        )
    options = {
        **common,
        "tp-size": rollout.tensor_parallel_size,
        "random-seed": seed,
        "dtype": config.model.dtype,
    }
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    return [str(python), "-m", "sglang.launch_server", *_words(options), *trust, *rollout.engine_args]


def _words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


class EngineClient(Client):
    """The control calls of one engine; never through the router, which does not forward them."""

    async def weight_version(self) -> str:
        """What the engine says it serves."""
        return str(_field(await self.request("GET", "/model_info", deadline_s=30), "weight_version"))

    async def load(self, directory: Path, version: str, timeout_s: float) -> None:
        """Replaces the weights under running requests: they wait, and go on with the new ones.

        Raises LoadFailed or ServiceError when the engine does not confirm the version; it is told to continue first.
        """
        try:
            await self.request("POST", "/pause_generation", json={"mode": "retract"}, deadline_s=60)
            body = {"model_path": str(directory), "weight_version": version, "flush_cache": True}
            response = await self.request("POST", "/update_weights_from_disk", json=body, deadline_s=timeout_s)
            if _field(response, "success") is not True:
                raise LoadFailed(f"the engine did not load weights {version}: {shorten(response.text)}")
        except ServiceError:
            await self._continue()
            raise
        await self._continue()
        await self.confirm(version)

    async def _continue(self) -> None:
        await self.request("POST", "/continue_generation", json={}, deadline_s=60)

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
