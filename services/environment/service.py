"""The episodes and sessions of an environment-server, independent of HTTP."""

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, get_args

from common import Json
from common.clients.rollout import RolloutClient
from common.errors import (
    ConfigError,
    Conflict,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    ServiceLost,
)
from common.process.futures import cancel
from common.process.metrics import Metrics
from common.settings.sections import EnvironmentSection, RuntimeSection
from common.wire.schemas import Completion, Episode, EpisodeRequest, EpisodeStatus, Int32
from services.environment.environments import Environment
from services.environment.messages import encodable
from services.environment.runners import load_runner
from services.environment.session import Session, session_closed
from services.environment.template import Template

log = logging.getLogger(__name__)
MAX_EPISODES = 4096
"""Maximum concurrent episodes; more are refused with 503."""
_REMEMBERED_S = 120.0
"""Time for which the episodes of a finished request are kept for a retry."""
_MAX_ENDED = 65_536
"""Ended sessions whose names are kept, so that late calls get the right error."""
_TRIES = 3
"""Maximum attempts to run an episode that dies."""
_DETAIL_CHARS = 10_000
_SEND_AGAIN = "it was deleted or never made: send the request again"


class _Known(NamedTuple):
    """A request whose episodes are running, or finished and remembered."""

    request: EpisodeRequest
    task: asyncio.Task[list[Episode]]


def session_seed(task_seed: int, index: int, attempt: int) -> int:
    """Returns the seed of the session of one try at an episode."""
    return (task_seed * 4096 + index) * _TRIES + attempt


class EpisodeService:
    """Runs episodes, once per request id, and holds their sessions.

    Args:
        config: the settings that name the environment.
        template: the model's chat template.
        router: client of the engines' router; closed by the caller.
        stop_token_ids: tokens that end an answer.
        metrics: Prometheus metrics; a new set when None.
        gateway: URL at which programs reach this server.
        environment: the caller's environment, instead of the one named by `config`.
        runtime: where programs run; None for this machine.

    Raises:
        ConfigError: the environment does not exist or cannot work here.
    """

    def __init__(
        self,
        config: EnvironmentSection,
        template: Template,
        router: RolloutClient,
        *,
        stop_token_ids: Sequence[int],
        metrics: Metrics | None = None,
        gateway: str = "",
        environment: Environment | None = None,
        runtime: RuntimeSection | None = None,
    ) -> None:
        runtime = runtime or RuntimeSection()
        self.runner = load_runner(config, gateway, runtime, environment)
        if self.runner.tools and template.no_tools:
            raise ConfigError(
                f"{self.runner.name} has tools, which the model's chat template cannot use: "
                f"{template.no_tools}",
                field="model.name",
                value=template.name,
                remedy="use a model that was trained with tools (docs/reference/models.md lists "
                "templates), set model.chat_template, or use an environment that has only step()",
            )
        if template.no_tools and self.runner.threads is None:  # not a class, whose tools are known
            # A program's tools are known once it calls; its calls with tools get this reason.
            log.warning("episodes cannot offer tools to the model: %s", template.no_tools)
        self._template = template
        self._router = router
        self._stop_token_ids = list(stop_token_ids)
        self._requests: dict[str, _Known] = {}
        self._sessions: dict[str, Session] = {}
        self._ended_sessions: OrderedDict[str, None] = OrderedDict()
        self._running = 0
        self._gives_rewards = self.runner.has_reward
        self._counts: Counter[EpisodeStatus] = Counter()
        self._refused_fields: set[str] = set()

        metrics = metrics or Metrics("environment-server")
        self._finished = metrics.counter(
            "environment_episodes_total", "Episodes that ended, by status", ["status"]
        )
        self._tried_again = metrics.counter(
            "environment_episodes_retried_total", "Episodes that died and were run again"
        )
        self._seconds = metrics.histogram(
            "environment_episode_duration_seconds", "Seconds of an episode, from reset to reward"
        )
        self.calls = metrics.counter(
            "environment_calls_total", "Calls of the model through the gateway, by API", ["api"]
        )
        self._refused = metrics.counter(
            "environment_calls_refused_total",
            "Calls of the model that were refused, by field",
            ["field"],
        )
        metrics.gauge("environment_episodes_running", "Episodes that run now").set_function(
            lambda: self._running
        )
        metrics.gauge("environment_episodes_running_limit", "Episodes that may run at once").set(
            MAX_EPISODES
        )
        metrics.gauge(
            "environment_hung_calls",
            "Calls of the environment that still run although nobody waits for them any more",
        ).set_function(lambda: self._hung_calls()["hung_calls"])
        metrics.gauge(
            "environment_hung_calls_limit", "Hung calls at which no more episodes can run"
        ).set(self._hung_calls()["hung_calls_limit"])

    async def episodes(self, request: EpisodeRequest) -> list[Episode]:
        """Runs the episodes of a request; a repeated request gets the same episodes.

        Raises Conflict for another request with this id, InvalidInput for an environment that is
        not served, Overloaded, or ServiceLost when neither this nor a later episode can be played.
        """
        known = self._requests.get(request.request_id)
        if known is not None and known.request != request:
            raise Conflict(
                "another request already used this id",
                field="request_id",
                value=request.request_id,
                remedy="use a new id for a new request",
            )
        if known is None or known.task.cancelled():
            self._check(request)
            self._running += request.n
            task = asyncio.create_task(self._run_all(request))
            loop = asyncio.get_running_loop()

            # Not in `_run_all`, which a task that is cancelled at once never begins.
            def ended(_: object) -> None:
                self._running -= request.n
                loop.call_later(_REMEMBERED_S, self._forget, task)

            task.add_done_callback(ended)
            known = _Known(request, task)
            self._requests[request.request_id] = known
        try:
            return await asyncio.shield(known.task)  # the client may come back
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling() or not known.task.cancelled():
                raise  # the caller left
            raise NotReady(
                "the episodes were ended: the request was deleted, or the server is stopping",
                field="request_id",
                value=request.request_id,
                remedy="try again later",
            ) from None

    def delete(self, request_id: str) -> None:
        """Ends the episodes of a request and forgets it. Raises NotFound."""
        if request_id not in self._requests:
            raise NotFound(
                "there is no such request", field="request_id", value=request_id, remedy=_SEND_AGAIN
            )
        self._requests.pop(request_id).task.cancel()

    def session(self, identifier: str) -> Session:
        """Returns the session of a running episode.

        Raises SessionClosed after its end, NotFound for an unknown name.
        """
        if identifier in self._ended_sessions:
            raise session_closed(identifier)
        if identifier not in self._sessions:
            raise NotFound(
                "there is no such session", field="session", value=identifier, remedy=_SEND_AGAIN
            )
        return self._sessions[identifier]

    def open_session(self, request: EpisodeRequest, index: int = 0, attempt: int = 0) -> Session:
        """Opens a session with an unguessable name, which is also its key."""
        sampling = request.sampling
        policy = request.policy

        async def sample(
            tokens: Int32, max_new_tokens: int, seed: int, stop: Sequence[str]
        ) -> Completion:
            # The engines look for the stop texts in the text that the session reads.
            stops = {"stop": list(stop), "skip_special_tokens": False} if stop else {}
            (completion,) = await self._router.generate(
                tokens,
                adapter=(policy.adapter, policy.version) if policy.adapter else None,
                n=1,
                max_new_tokens=max_new_tokens,
                temperature=sampling.temperature,
                stop_token_ids=self._stop_token_ids,
                sampling_seed=seed,
                parameters=stops,
            )
            return completion

        session = Session(
            secrets.token_urlsafe(24),
            self._template,
            sample,
            limits=request.limits,
            max_new_tokens=sampling.max_new_tokens,
            seed=session_seed(request.task.seed, index, attempt),
        )
        self._sessions[session.id] = session
        return session

    def refuse(self, session: Session, error: InvalidInput) -> None:
        """Records that a call of a session is refused; the first of each field is logged."""
        # messages[3].role counts as messages
        field = (error.field or "").partition("[")[0]
        if field not in self._refused_fields:
            self._refused_fields.add(field)
            log.warning("calls of %s are refused: %s", self.runner.name, error)
        self._refused.labels(field).inc()
        session.refused_calls += 1
        # The trainer shows this text: the field alone would not say what to do.
        session.refusal = session.refusal or f"{error.field}: {error.message}; {error.remedy}"

    def close_session(self, session: Session) -> None:
        """Ends a session; later calls get SessionClosed."""
        session.close()
        self._sessions.pop(session.id, None)
        self._ended_sessions[session.id] = None
        if len(self._ended_sessions) > _MAX_ENDED:
            self._ended_sessions.popitem(last=False)

    def environments(self) -> list[Json]:
        """Returns the served environments, with the functions offered to the model."""
        served = {
            "name": self.runner.name,
            "tools": list(self.runner.tools.values()),
            "has_steps": self.runner.has_steps,
            "has_reward": self.runner.has_reward,
            "gives_verdicts": self.runner.gives_verdicts,
        }
        return [served]

    def stats(self) -> Json:
        """Returns the episodes so far by status, and what is running now."""
        return {
            "episodes": {status: self._counts[status] for status in get_args(EpisodeStatus)},
            "running": self._running,
            "running_limit": MAX_EPISODES,
            "sessions": len(self._sessions),
        } | self._hung_calls()

    def problem(self) -> str | None:
        """Returns why no more episodes can run, or None."""
        threads = self.runner.threads
        return threads.problem if threads is not None else None

    async def close(self) -> None:
        """Ends every episode."""
        await cancel([known.task for known in self._requests.values()])
        await self.runner.close()

    def _hung_calls(self) -> dict[str, int]:
        threads = self.runner.threads
        if threads is None:
            return {"hung_calls": 0, "hung_calls_limit": 0}
        return {"hung_calls": threads.hung, "hung_calls_limit": threads.limit}

    def _check(self, request: EpisodeRequest) -> None:
        """Raises InvalidInput for an environment that is not served, or Overloaded."""
        if request.task.env != self.runner.name:
            raise InvalidInput(
                "there is no such environment",
                field="task.env",
                value=request.task.env,
                remedy=f"this server serves only {self.runner.name}",
            )
        if self._running + request.n > MAX_EPISODES:
            raise Overloaded(
                f"{self._running} episodes are running, the limit is {MAX_EPISODES}",
                field="n",
                value=request.n,
                remedy="try again later, or add nodes of environment-server",
            )

    def _forget(self, task: asyncio.Task[list[Episode]]) -> None:
        """Drops the answer of a request, unless its id has been used again."""
        for request_id, known in list(self._requests.items()):
            if known.task is task:
                del self._requests[request_id]

    async def _run_all(self, request: EpisodeRequest) -> list[Episode]:
        try:
            async with asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(self._run(request, i)) for i in range(request.n)]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # such as ServiceLost

        episodes = [task.result() for task in started]
        self._fail_without_reward(episodes)
        for episode in episodes:
            self._counts[episode.status] += 1
            self._finished.labels(episode.status).inc()
        return episodes

    def _fail_without_reward(self, episodes: list[Episode]) -> None:
        """Gives episodes without a reward 0 if others of this environment had one and the policy
        is the reason, else marks them as failed.

        Otherwise the run's reward functions would grade them on another scale.
        """
        ended = [episode for episode in episodes if episode.status == "ok"]
        if any(episode.reward is not None for episode in ended):
            self._gives_rewards = True
        if not self._gives_rewards:
            return
        for episode in ended:
            if episode.reward is not None:
                continue
            # Nothing to grade: no tool call worked, or a limit came before the first reward.
            did_nothing = episode.metrics["tool_calls"] == episode.metrics["tool_errors"]
            reached_limit = episode.stop_reason != "done"
            if reached_limit or (self.runner.tools and did_nothing):
                episode.reward = 0.0
                episode.components = {"reward": 0.0}
            else:
                episode.status = "error"
                episode.sequences = []
                episode.detail = (
                    f"it ended ({episode.stop_reason}) without a reward, although other episodes "
                    "of this environment have one"
                )

    async def _run(self, request: EpisodeRequest, index: int) -> Episode:
        """Runs one episode, again if it died."""
        for attempt in range(_TRIES):
            episode = await self._run_once(request, index, attempt)
            if episode.status != "died":
                break
            if attempt + 1 < _TRIES:
                self._tried_again.inc()
        return episode

    async def _run_once(self, request: EpisodeRequest, index: int, attempt: int) -> Episode:
        started = time.monotonic()
        session = self.open_session(request, index, attempt)
        try:
            outcome = await self.runner.run(request.task, session, request.limits)
        finally:
            self.close_session(session)
        for asked in session.requests.open:
            if isinstance(asked.error, ServiceLost):
                raise asked.error

        seconds = time.monotonic() - started
        self._seconds.observe(seconds)
        if session.refusal:
            reason = f"{session.refused_calls} calls refused, the first: {session.refusal}"
            outcome.detail = f"{outcome.detail}; {reason}" if outcome.detail else reason
        sequences = session.sequences(outcome.turn_rewards) if outcome.status == "ok" else []
        if outcome.status == "ok" and not sequences:
            outcome.status = "error"
            outcome.detail = "the model was not asked: nothing to train on"
            if session.stop_reason == "context":
                outcome.detail = (
                    "nothing to train on: the first messages are too long for environment.context "
                    "(unless it is set: rollout.max_context_tokens, or max_prompt_length + "
                    "max_new_tokens in Python)"
                )

        try_of_it = f".{attempt}" if attempt else ""
        return Episode(
            id=f"{request.request_id}-{index}{try_of_it}",
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            # A program may grade what the model was never asked for.
            reward=outcome.reward if outcome.status == "ok" else None,
            answer=encodable(outcome.answer),
            sequences=sequences,
            components={encodable(name): value for name, value in outcome.components.items()},
            metrics={
                "turns": float(session.turns),
                "sampled_tokens": float(session.sampled_tokens),
                "seconds": seconds,
                "tool_calls": float(outcome.tool_calls),
                "tool_errors": float(outcome.tool_errors),
                "tool_seconds": outcome.tool_seconds,
                "refused_calls": float(session.refused_calls),
            },
            detail=encodable(outcome.detail)[:_DETAIL_CHARS],
            refusal=encodable(session.refusal)[:_DETAIL_CHARS],
        )
