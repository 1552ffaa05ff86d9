"""Serves a verifiers environment: `python server.py ID-or-FILE.toml PORT`, started by the
environment-server.

    environment-server ── POST /run: a task and its session ──► PlayedEpisodes.run ──► verifiers
           ▲                                                                              │ harness
           └─ the session's calls ◄── PlayedEpisodes.call ◄── POST /v1/…, X-Session-ID ◄──┘

It runs in its own virtual environment, with verifiers and the package of the taskset, and imports
nothing from this project.
"""

import asyncio
import importlib.metadata
import itertools
import sys
import tomllib
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

VERSIONS = "0.4."
"""The versions whose interfaces this file uses; verifiers changes them with every minor version."""
WRONG_SETTING = 78
"""Exit status that says that another start would not help."""
_LOST = ("SandboxError", "TunnelError", "InterceptionError")
"""verifiers' names for errors of the machines behind an episode."""
_HEADERS = ("content-type", "x-stainless-retry-count")
"""The headers of a call that the gateway reads, besides the key."""
_MAX_BODY_BYTES = 1 << 30


class Wrong(Exception):
    """The task cannot be played as it is, or its episode failed."""


class Lost(Exception):
    """A machine behind the episode was lost: another try may succeed."""


class PlayedEpisodes:
    """Plays episodes of an environment, many at once.

    Args:
        environment: verifiers' environment.
        url: URL of this server.
    """

    def __init__(self, environment: Any, url: str) -> None:
        self._environment = environment
        self._url = url
        self._http: ClientSession | None = None
        self._tasks: list[Any] = []
        self._more_tasks = iter(environment.taskset)
        self._reading = asyncio.Lock()
        self._sessions: dict[str, dict[str, str]] = {}
        """The session of each running trace, by the trace's id."""

    async def serving(self, app: web.Application) -> AsyncIterator[None]:
        """Holds what the episodes share while the app runs."""
        connector = TCPConnector(limit=0)
        timeout = ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=timeout) as http:
            self._http = http
            async with self._environment.serving():
                yield

    async def run(self, request: web.Request) -> web.Response:
        """Plays an episode and answers with its weighted rewards by name."""
        try:
            rewards = await self._play(await request.json())
        except Wrong as error:
            return web.Response(status=422, text=str(error))
        except Lost as error:
            return web.Response(status=503, text=str(error))
        except Exception as error:  # of the environment's code
            return web.Response(status=422, text=f"{type(error).__name__}: {error}")
        return web.json_response(rewards)

    async def call(self, request: web.Request) -> web.Response:
        """Passes a call of an episode on to its session.

        verifiers keeps a client for each endpoint, so this is the one endpoint of all episodes.
        """
        assert self._http is not None
        session = self._sessions.get(request.headers.get("X-Session-ID", ""))
        if session is None:
            return _error(404, "there is no such episode")
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        headers["authorization"] = f"Bearer {session['api_key']}"
        url = f"{session['openai_base_url']}/{request.match_info['path']}"
        body = await request.read()
        try:
            async with self._http.post(url, data=body, headers=headers) as answer:
                content = await answer.read()
        except (ClientError, OSError) as error:
            return _error(502, f"the session did not answer: {type(error).__name__} {error}")
        shown = {"content-type": answer.headers.get("content-type", "application/json")}
        return web.Response(body=content, status=answer.status, headers=shown)

    async def models(self, request: web.Request) -> web.Response:
        """Lists the one model."""
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def health(self, request: web.Request) -> web.Response:
        """Answers once the environment is ready."""
        return web.json_response({"status": "ok"})

    async def _play(self, task: dict[str, Any]) -> dict[str, float]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        vf_task = await self._task(task["columns"].get("index"))
        traces: list[Any] = []

        def begin(trace: Any) -> None:
            self._check_agent(trace.agent)
            traces.append(trace)
            self._sessions[trace.id] = task["session"]

        # `call` sets the session's key.
        client = EvalClientConfig(base_url=f"{self._url}/v1", api_key_var="NO_KEY")
        try:
            episode = await self._environment.run_episode(
                vf_task, ModelContext("policy", client), on_trace=begin
            )
        finally:
            for trace in traces:
                self._sessions.pop(trace.id, None)
        _check(episode, traces)
        return _rewards(episode)

    def _check_agent(self, agent: Any) -> None:
        """Raises Wrong for an agent that must not be trained but would play with the policy."""
        if agent is None or agent.trainable:
            return
        seat = getattr(self._environment.config, agent.name or "", None)
        if seat is not None and seat.client is None:
            raise Wrong(
                f"the agent {agent.name} is not to be trained, but plays with the policy: give it "
                f"a model and a client of its own in [env.{agent.name}]"
            )

    async def _task(self, index: Any) -> Any:
        """Returns the task at a position of the taskset. Raises Wrong if there is none."""
        if not str(index).isdecimal():
            raise Wrong(
                f"the row names no task of the taskset: column index is {index!r}; put the "
                "position of the task there"
            )
        position = int(index)
        async with self._reading:
            # As far as needed: a taskset may be endless.
            missing = max(0, position + 1 - len(self._tasks))
            self._tasks += await asyncio.to_thread(
                list, itertools.islice(self._more_tasks, missing)
            )
        if position >= len(self._tasks):
            raise Wrong(f"the taskset has no task {index}: column index is beyond its end")
        return self._tasks[position]


def _check(episode: Any, traces: Sequence[Any]) -> None:
    """Raises Wrong, or Lost, unless an episode ended by itself."""
    if not episode.ok:
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        lines = [f"{error.type}: {error.message}" for error in errors]
        kind = Lost if any(error.type in _LOST for error in errors) else Wrong
        raise kind("\n".join(lines) or "the episode failed")

    for trace in traces:
        if trace.is_timeout:
            raise Wrong(
                f"it ended by {trace.stop_condition}, a time-out of verifiers: set "
                "environment.deadline_s instead, which never gives a reward"
            )


def _rewards(episode: Any) -> dict[str, float]:
    """Returns the weighted rewards of all traces, by name. Raises Wrong."""
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is None:
                raise Wrong(f"the reward {name} was not computed")
            rewards[name] = rewards.get(name, 0.0) + reward.value
    if not rewards:
        raise Wrong("the episode has no reward: give its task a method with @vf.reward")
    return rewards


def configuration(target: str) -> Any:
    """Returns verifiers' configuration for `target`, a TOML file or a taskset's id. Raises
    Wrong.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import PrimeConfig
    from verifiers.v1.utils.loaders import resolve_env_config

    values: dict[str, Any] = {"taskset": {"id": target}}
    if target.endswith(".toml"):
        values = _read(target)
    config = resolve_env_config(deepcopy(values))  # verifiers changes what it is given

    for name, agent in agent_config_fields(config).items():
        # verifiers would rent a machine where nothing is said.
        if isinstance(agent.runtime, PrimeConfig) and "runtime" not in values.get(name, {}):
            values.setdefault(name, {})["runtime"] = {"type": "subprocess"}
    config = resolve_env_config(deepcopy(values))

    for owner in (config, *agent_config_fields(config).values()):
        if owner.retries.max_retries or any(rule.max_retries for rule in owner.retries.rules):
            raise Wrong(
                "retries would train on abandoned tries with the reward of the last one; remove "
                "them: the environment-server plays lost episodes again"
            )
    return config


def _read(path: str) -> dict[str, Any]:
    """Returns the table `env` of a file. Raises Wrong."""
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise Wrong(f"{path} cannot be read: {error}") from error
    others = sorted(set(content) - {"env"})
    if others:
        raise Wrong(
            f"{path} has {', '.join(others)} beside [env]; remove it: the model, its sampling and "
            "the choice of tasks are the run's"
        )
    values = content.get("env")
    if not isinstance(values, dict):
        raise Wrong(f"{path} has no table [env]: write [env.taskset] with id, as for vf-eval")
    return values


def create_app(config: Any, url: str) -> web.Application:
    """Returns the app that plays an environment."""
    from verifiers.v1.utils.loaders import load_environment

    episodes = PlayedEpisodes(load_environment(config), url)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(episodes.serving)
    app.router.add_get("/health", episodes.health)
    app.router.add_get("/v1/models", episodes.models)
    app.router.add_post("/run", episodes.run)
    app.router.add_post("/v1/{path:.+}", episodes.call)
    return app


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def refuse(reason: str) -> NoReturn:
    """Ends this process, which should not be started again."""
    print(reason, file=sys.stderr)
    sys.exit(WRONG_SETTING)


def main(target: str, port: int) -> None:
    """Serves until SIGTERM."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(VERSIONS):
        refuse(
            f"of verifiers, only {VERSIONS}* is supported, and {sys.executable} has {version}: "
            f"install verifiers=={VERSIONS}* there"
        )
    try:
        config = configuration(target)
        app = create_app(config, f"http://127.0.0.1:{port}")
    except Exception as error:
        refuse(f"{target} is no environment of verifiers: {error}")
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        print=None,
        access_log=None,
        shutdown_timeout=0.1,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
