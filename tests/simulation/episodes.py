"""Simulated runs whose groups are episodes: the scene of `world`, with the real environment-server on
one node or two. Agents behind a URL play them, or a class in the server.
"""

import asyncio
import random
import re
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import orjson

from common.clients.base import Client
from common.clients.environment import EnvironmentClient
from common.clients.network import Reply, Sent
from common.clients.rollout import RolloutClient
from common.wire import codec
from common.wire.schemas import Completion, Episode, EpisodeRequest, Episodes, EpisodeSequence
from services.environment import program_runner, threads
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from tests.simulation.models import expect
from tests.simulation.network import Answered, Call, Model, Wire
from tests.simulation.players import (
    CALL_HEADER,
    Agent,
    Game,
    Policy,
    reward_of_places,
    reward_of_texts,
    template,
    tokenizer,
)
from tests.simulation.scene import Violation, ask_json
from tests.simulation.stand_ins import Spans, reward_of
from tests.simulation.virtual_time import VirtualLoop
from tests.simulation.world import World
from trainer.rollouts.services import Services

_TURNS = 8
_DEADLINE_S = 20.0
_TOOL_S = 5.0
_REMEMBERED_S = 119.0
"""So long after their end, episodes are answered again as they were."""
_LONGEST_S = 3_000.0
"""Longest time for which episodes run that nobody waits for."""
_FOUND = re.compile(r"at (\d+)\.")
Key = tuple[tuple[int, ...], tuple[int, ...]]


class _Gateway(Model):
    """A node of the environment-server: what it answers to the trainer is checked."""

    def __init__(self, scene: "EpisodeWorld") -> None:
        self._scene = scene
        self.arrived: set[str] = set()
        """Calls of agents whose head has reached it."""
        self._known: dict[str, tuple[float, list[Any]]] = {}
        """The episodes of a request, and when they ended."""
        self._life = 0
        self.lives = 0

    def begun(self, call: Call) -> None:
        if CALL_HEADER in call.headers:
            self.arrived.add(call.headers[CALL_HEADER])

    def asked(self, call: Call) -> Answered:
        if call.method == "DELETE":
            self._known.pop(call.path.removeprefix("/episodes/"), None)
        if str(call) != "POST /episodes":
            return super().asked(call)
        request = EpisodeRequest.model_validate_json(call.content)
        came = self._scene.loop.now
        life = self.lives

        def answered(reply: Reply) -> None:
            episodes = codec.decode(reply.content, Episodes).episodes
            self._scene.check_episodes(request, episodes, call.headers.get("x-run-id", ""))
            if life != self._life:
                self._life = life
                self._known.clear()
            ended, known = self._known.get(request.request_id, (-1e9, episodes))
            is_same = list(map(_plain, known)) == list(map(_plain, episodes))
            is_known = came < ended + _REMEMBERED_S
            expect(is_same or not is_known, f"{request.request_id} has other episodes than before")
            # Whoever waited for it knows when it ended.
            if self._scene.loop.now > came + 0.1:
                self._known[request.request_id] = self._scene.loop.now, episodes

        return answered


class EpisodeWorld(World):
    """A run of episodes."""

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        super().__init__(seed, directory, loop)
        self.delivered: dict[Key, tuple[Spans, float | None]] = {}
        """Sequences of whole episodes: their versions, and the reward that they must have."""
        self._owners: dict[tuple[int, ...], str] = {}
        """The episode to which an answer of the engines belongs."""
        self._agent_faults = self.rng.choice((0.0, 0.0, 0.2))
        grading = self.rng.choice(("returned", "posted", "none"))
        self._is_graded = self._plays_game or grading != "none"
        says_retries = self.rng.random() < 0.5
        self._gateways: list[_Gateway] = []
        self._servers = []
        for index in range(self.rng.choice((1, 1, 2))):
            gateway = _Gateway(self)
            self._gateways.append(gateway)
            name = f"environment-{index}"
            make = lambda _, index=index: self._environment_app(index)  # noqa: E731
            self._servers.append(self.node(name, make, model=gateway))

        def has_arrived(call: str) -> bool:
            return any(call in gateway.arrived for gateway in self._gateways)

        # Apart: the other seeds stay what they are.
        drawn = random.Random(seed)

        def make_agent(_: Path) -> Agent:
            assert isinstance(self.engines, Policy)
            agent = Agent(
                self.net,
                self.engines,
                grading=grading,
                says_retries=says_retries,
                has_arrived=has_arrived,
                rewrites=lambda: seed % 3 == 1 and drawn.random() < 0.3,
            )
            agent.failing = self._agent_faults
            return agent

        self.node("agent", make_agent)
        # Nobody could tell a copy of a task, or of a call that an agent makes, from another one.
        self.net.is_copied = lambda call: call.path != "/play" and CALL_HEADER not in call.headers
        self.net.is_noticed = lambda call: CALL_HEADER in call.headers
        Game._trouble = self._trouble

    def more_settings(self) -> dict[str, Any]:
        self._plays_game = self.rng.random() < 0.3
        name = f"python:{Game.__module__}:{Game.__name__}"
        has_limit = self._plays_game and self.rng.random() < 0.5
        tool_s = {"environment.tool_timeout_s": _TOOL_S} if has_limit else {}
        return tool_s | {
            "environment.name": name if self._plays_game else "agent:http://agent/play",
            "environment.turns": _TURNS,
            "environment.deadline_s": _DEADLINE_S,
            "sampling.max_new_tokens": 256,
            "rollout.max_context_tokens": 4096,
            # Of sequences, of which an agent makes several in an episode.
            "replay.capacity": 100_000,
        }

    def make_engines(self) -> Policy:
        return Policy(self.rng, asyncio.sleep)

    def stand_ins(self, stack: ExitStack) -> None:
        super().stand_ins(stack)
        stack.enter_context(patch.object(program_runner, "_post", self._post))
        stack.enter_context(patch.object(threads, "in_daemon_thread", self._in_thread))

    async def _post(self, url: str, content: Any) -> httpx.Response:
        """Posts a task to the agent, in the place of `program_runner._post`."""
        body = orjson.dumps(content)
        sent = Sent("POST", url, {}, body, connect_s=5.0, moved=lambda _: None, receive=None)
        reply = await Wire(self.net).exchange(sent)
        return httpx.Response(reply.status_code, content=reply.content)

    def _trouble(self) -> str:
        """Draws what befalls a call of a method; "" for nothing."""
        if not self.chance.on or self.rng.random() >= self._agent_faults:
            return ""
        return self.rng.choice(("raises", "hangs"))

    def _in_thread(self, function: Any, name: str) -> "Future[Any]":
        if self._trouble() == "hangs":
            return Future()
        return self.loop.in_daemon_thread(function, name)

    def _environment_app(self, index: int) -> Any:
        config = self.config
        service = EpisodeService(
            config.environment,
            template(),
            RolloutClient(
                "rollout-server", "http://router", deadline_s=config.limits.service_timeout_s
            ),
            stop_token_ids=[tokenizer().eos_token_id],
            gateway=f"http://environment-{index}",
            runtime=config.runtime,
        )
        app = create_environment_app(service, nodes=len(self._servers))
        self._gateways[index].lives += 1
        self._servers[index].live(app)
        return app

    def services(self) -> Services:
        services = super().services()
        limit_s = self.config.limits.service_timeout_s

        def node(index: int) -> Client:
            return Client("environment-server", f"http://environment-{index}", deadline_s=limit_s)

        services.environment = EnvironmentClient(
            "environment-server", "http://environment-0", deadline_s=limit_s, node=node
        )
        return services

    # ------------------------------------------------------------ the invariants

    def check_episodes(self, request: EpisodeRequest, episodes: list[Episode], run: str) -> None:
        """Checks the episodes of a request. Raises Broken."""
        name = request.request_id
        if run == self.engines.run:
            self.engines.begin(name.removesuffix("-again"))
        expect(len(episodes) == request.n, f"{name} has {len(episodes)} episodes")
        for index, episode in enumerate(episodes):
            own = f"{name}-{index}"
            expect(
                re.fullmatch(rf"{own}(\.[12])?", episode.id) is not None, f"{episode.id} of {own}"
            )
            if episode.status != "ok":
                self.story.say(f"{episode.id} is lost, {episode.status}: {episode.detail[:80]}")
                expect(episode.reward is None, f"{episode.id}, {episode.status}, has a reward")
                expect(not episode.sequences, f"{episode.id}, {episode.status}, has sequences")
            else:
                self._check_episode(episode)

    def _check_episode(self, episode: Episode) -> None:
        name = episode.id
        texts: list[str] = []
        for sequence in episode.sequences:
            texts += self._sampled_in(sequence, name)
        turns = sum(len(sequence.turns) for sequence in episode.sequences)
        sampled = sum(int(sequence.mask.sum()) for sequence in episode.sequences)
        counted = episode.metrics["turns"], episode.metrics["sampled_tokens"]
        expect(counted == (turns, sampled), f"{name} counts {counted}, not {(turns, sampled)}")
        expect(turns <= _TURNS, f"{name} has {turns} answers")
        reward: float | None = None
        if self._plays_game:
            (sequence,) = episode.sequences
            found = [int(place) for place in _FOUND.findall(sequence.text)]
            reward = reward_of_places(found)
        elif self._is_graded:
            reward = reward_of_texts(texts)
        expect(episode.reward == reward, f"{name} has the reward {episode.reward}, not {reward}")
        if reward is None:
            reward = reward_of(episode.answer)
            expect(episode.answer in texts, f"{name} has an answer that no engine gave")
        for sequence in episode.sequences:
            self.delivered[_key(sequence)] = sequence.weight_versions, reward

    def _sampled_in(self, sequence: EpisodeSequence, name: str) -> list[str]:
        """Returns the texts that were sampled in a sequence; all else must be of the prompts."""
        tokens = [*map(int, sequence.prompt_ids), *map(int, sequence.token_ids)]
        before = len(sequence.prompt_ids)
        own = _versions(sequence.weight_versions, len(sequence.token_ids))
        texts = []
        is_sampled = [0] * len(sequence.token_ids)
        for turn in sequence.turns:
            ids = tokens[before + turn.start : before + turn.end]
            key = self.engines.key_of(tokens[: before + turn.start], ids)
            spans = self.engines.generated.get(key)
            if spans is None:
                raise AssertionError(f"no engine was asked for an answer of {name}")
            right = _versions(spans, len(ids))
            said = own[turn.start : turn.end]
            expect(said == right, f"{name} says versions {said}, not {right}")
            if not self._plays_game:
                owner = self._owners.setdefault(key, name)
                expect(owner == name, f"an answer of {owner} is in {name} too")
            is_sampled[turn.start : turn.end] = [1] * len(ids)
            texts.append(tokenizer().decode(ids[:-1]))
        expect(sequence.mask.tolist() == is_sampled, f"{name} trains on what was not sampled")
        return texts

    def spans_of(self, completion: Completion) -> Spans | None:
        found = self.delivered.get(_key(completion))
        return found and found[0]

    def reward_of(self, completion: Completion) -> float:
        _, reward = self.delivered[_key(completion)]
        assert reward is not None
        return reward

    def check_end(self, progress: Any) -> None:
        super().check_end(progress)
        self.sleep(_LONGEST_S)
        self.check_nodes()
        for server in self._servers:
            stats = ask_json(self, server, "/stats")
            if stats["running"] or stats["sessions"]:
                raise Violation(f"{server.name} still plays, long after the end: {stats}")


def _plain(episode: Episode) -> Any:
    return codec.encode(episode)


def _key(part: Any) -> Key:
    """Returns the tokens of a sequence or of the completion that it became."""
    return tuple(part.prompt_ids.tolist()), tuple(part.token_ids.tolist())


def _versions(spans: Spans, length: int) -> list[int]:
    """Returns the version of every token."""
    versions = [-1] * length
    for version, start, end in spans:
        versions[start:end] = [version] * (end - start)
    return versions
