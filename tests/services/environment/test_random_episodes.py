"""Random episodes over HTTP, against the rules of the page on environments written anew: answers,
tool calls of every kind, what `step` and the rewards return, limits."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.wire.schemas import Episode
from tests.support.environments.environments import Served, request_for, served
from tests.support.models.trap_models import letters

UNREADABLE = "The tool call could not be read."
CALLS: list[tuple[str, dict[str, Any], str, bool]] = [
    ("add", {"a": 1, "b": 2}, "3", True),
    ("text", {}, "as it is", True),
    ("data", {}, '{"é": [1, null]}', True),
    ("shown", {}, '"a shown thing"', True),
    ("later", {}, "late", True),
    ("broken", {}, "error: RuntimeError: out of order", False),
    ("add", {"a": 1}, "error: add: missing a required argument: 'b'", False),
    ("nothing", {}, "error: there is no tool nothing; the tools are: ", False),
]
"""Name, arguments, what the model is told, and whether it worked."""
_SPEAKS: list[Any] = [{"role": "assistant", "content": "I"}, {"role": "user", "content": "you"}]
WRONG: list[Any] = [7, [], [{"role": "user"}, 5], _SPEAKS[:1], _SPEAKS, {"a": 1}]
"""What `step` must not return."""


class Thing:
    def __str__(self) -> str:
        return "a shown thing"


@dataclass
class Turn:
    """An answer, and what follows it."""

    text: str = ""
    calls: list[int] = field(default_factory=list)
    """Indices of `CALLS`."""
    is_unreadable: bool = False
    returned: Any = None

    def sampled(self) -> str:
        """What the model writes."""
        if self.is_unreadable:
            return f"{self.text}<tool_call>\n{{not JSON\n</tool_call>"
        written = [
            f"<tool_call>\n{json.dumps({'name': CALLS[n][0], 'arguments': CALLS[n][1]})}\n</tool_call>"
            for n in self.calls
        ]
        return "\n".join([self.text] * bool(self.text) + written)


@dataclass
class Plan:
    turns: list[Turn]
    begins_with: Any = None
    """What `reset` returns."""
    reward: Any = 1.0
    turn_rewards: list[float] = field(default_factory=list)
    """One for each turn of the plan; the environment returns those of the turns that were played."""
    has_wrong_rewards: bool = False
    close_fails: bool = False
    seen: list[list[dict[str, Any]]] = field(default_factory=list)
    """The messages that `step` was called with."""
    closed: int = 0
    left: Iterator[Turn] = field(default_factory=lambda: iter(()))
    answers: int = 0


class Game:
    """Follows the plan of the episode."""

    plan: ClassVar[Plan]

    def reset(self, prompt: str, ground_truth: str) -> Any:
        """Begins."""
        assert (prompt, ground_truth) == ("Begin.", "the truth")
        return self.plan.begins_with

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def text(self) -> str:
        """Returns a text."""
        return "as it is"

    def data(self) -> Any:
        """Returns data."""
        return {"é": [1, None]}

    def shown(self) -> Any:
        """Returns an object."""
        return Thing()

    async def later(self) -> str:
        """Returns a text later."""
        return "late"

    def broken(self) -> str:
        """Raises."""
        raise RuntimeError("out of order")

    def step(self, messages: list[dict[str, Any]]) -> Any:
        """Goes on."""
        self.plan.seen.append(messages)
        return self.plan.turns[self.plan.answers - 1].returned

    def get_turn_rewards(self) -> list[float]:
        """Returns a reward for every answer."""
        count = self.plan.answers
        return self.plan.turn_rewards[:count] + [0.0] * self.plan.has_wrong_rewards

    def get_reward(self) -> Any:
        """Returns the reward."""
        return self.plan.reward

    def close(self) -> None:
        """Ends."""
        self.plan.closed += 1
        if self.plan.close_fails:
            raise RuntimeError("the door is stuck")


def random_turn(draw: random.Random) -> Turn:
    kind = draw.random()
    text = draw.choice(["", "Well.", "I think so"])
    if kind < 0.45:
        return Turn(text, calls=[draw.randrange(len(CALLS)) for _ in range(draw.randint(1, 3))])
    if kind < 0.55:
        return Turn(text, is_unreadable=True)
    messages = [{"role": "user", "content": "one"}, {"role": "system", "content": "two"}]
    returned = draw.choice(["go on", messages[:1], messages])
    if draw.random() < 0.1:
        returned = draw.choice(WRONG)
    return Turn(text or "No.", returned=returned)


def random_plan(draw: random.Random) -> Plan:
    turns = [random_turn(draw) for _ in range(draw.randint(0, 5))]
    turns.append(Turn("The end.", returned=draw.choice([None, ""])))
    return Plan(
        turns,
        begins_with=draw.choice([None, "", " More.", [{"role": "user", "content": "more"}]]),
        reward=draw.choice([0.5, 1, {"a": 0.25, "b": -1.0}, {"a": 2.0}] * 3 + [math.nan, {}, "x"]),
        turn_rewards=[draw.choice([0.0, 0.25, -1.0]) for _ in turns],
        has_wrong_rewards=draw.random() < 0.05,
        close_fails=draw.random() < 0.1,
    )


@dataclass
class Expected:
    chat: list[tuple[str, str]]
    seen: list[list[tuple[str, str]]] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    errors: int = 0
    tokens: int = 0
    answer: str = ""
    stop_reason: str = "done"
    fails: bool = False


def expected_of(plan: Plan, tokenizer: Any, *, most_turns: int, most_calls: int) -> Expected:
    more = plan.begins_with
    chat = [("user", "Begin." + (more if isinstance(more, str) else ""))]
    if isinstance(more, list):
        chat.append(("user", "more"))
    found = Expected(chat)
    for turn in plan.turns:
        if found.turns == most_turns:
            found.stop_reason = "turns"
            break
        found.turns += 1
        found.tokens += len(letters(tokenizer, turn.sampled()))
        # An answer whose call cannot be read stays as the model wrote it.
        found.answer = turn.sampled() if turn.is_unreadable else turn.text
        chat.append(("assistant", found.answer))
        if turn.is_unreadable:
            found.errors += 1
            chat.append(("user", UNREADABLE))
        elif turn.calls:
            if found.calls + len(turn.calls) > most_calls:
                found.stop_reason = "tool_calls"
                break
            found.calls += len(turn.calls)
            found.errors += sum(not CALLS[n][3] for n in turn.calls)
            chat += [("tool", CALLS[n][2]) for n in turn.calls]
        else:
            found.seen.append(list(chat))
            if turn.returned in WRONG:
                found.fails = True
                break
            if isinstance(turn.returned, str) and turn.returned:
                chat.append(("user", turn.returned))
            elif turn.returned:
                chat += [(each["role"], each["content"]) for each in turn.returned]
    if plan.has_wrong_rewards or plan.reward in ({}, "x") or plan.reward != plan.reward:
        found.fails = True
    return found


def shown(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Messages without what differs between machines and versions: which tools there are."""
    found = []
    for message in messages:
        content = message["content"]
        for start in (UNREADABLE, CALLS[-1][2]):
            if content.startswith(start):
                content = start
        found.append((message["role"], content))
    return found


async def played(server: Served, plan: Plan, name: str, **limits: Any) -> Episode:
    Game.plan = plan
    plan.left = iter(plan.turns)
    request = request_for(server.service.runner.name, "Begin.", "the truth", **limits)
    (episode,) = await server.client.episodes(request.model_copy(update={"request_id": name}))
    return episode


async def test_an_episode_is_what_its_answers_its_environment_and_its_limits_make_of_it() -> None:
    def reply(_: str) -> str:
        Game.plan.answers += 1
        return next(Game.plan.left).sampled()

    async with served(Game, reply) as server:
        for seed in range(70):
            draw = random.Random(seed)
            plan = random_plan(draw)
            limits = {"turns": draw.choice([2, 3, 9]), "tool_calls": draw.choice([2, 3, 99])}
            episode = await played(server, plan, f"r{seed}", **limits)
            expected = expected_of(
                plan,
                server.engine.tokenizer,
                most_turns=limits["turns"],
                most_calls=limits["tool_calls"],
            )
            check(plan, episode, expected)


def check(plan: Plan, episode: Episode, expected: Expected) -> None:
    assert [shown(messages) for messages in plan.seen] == expected.seen
    assert episode.answer == expected.answer
    assert plan.closed == 1
    metrics = episode.metrics
    assert (metrics["turns"], metrics["sampled_tokens"]) == (expected.turns, expected.tokens)
    assert (metrics["tool_calls"], metrics["tool_errors"]) == (expected.calls, expected.errors)
    assert (metrics["tool_seconds"] > 0) == (expected.calls > 0)
    assert metrics["seconds"] > metrics["tool_seconds"]
    assert metrics["refused_calls"] == 0
    if expected.fails:
        assert (episode.status, episode.reward, episode.sequences) == ("error", None, [])
        assert episode.detail
        return

    assert (episode.status, episode.stop_reason) == ("ok", expected.stop_reason)
    parts = plan.reward if isinstance(plan.reward, dict) else {"reward": plan.reward}
    of_turns = plan.turn_rewards[: expected.turns]
    assert episode.reward == sum(parts.values()) + sum(of_turns)
    assert episode.components == parts
    assert ("the door is stuck" in episode.detail) == plan.close_fails
    assert bool(episode.detail) == plan.close_fails
    (sequence,) = episode.sequences
    assert sequence.mask.sum() == expected.tokens
    assert [turn.reward for turn in sequence.turns] == of_turns
    is_cut = expected.stop_reason != "done"
    assert sequence.finish_reason == ("length" if is_cut else "stop")
