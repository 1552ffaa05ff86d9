"""Episodes over HTTP: TRL's environment classes, several turns, failures that are never a zero,
repeated requests."""

import asyncio
import functools
import json
import math
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from common.settings.sections import EnvironmentSection, RuntimeSection
from common.wire import codec
from common.wire.schemas import Episodes
from services.environment import service
from services.environment.class_runner import ClassRunner
from services.environment.environments import Environment
from services.environment.runners import load_runner
from tests.support.environments.environments import Calculator, Faulty, Guess, request_for, served
from tests.support.errors import raises
from tests.support.models.trap_models import letters
from tests.support.processes.clocks import leap

NAMES = {kind: f"python:{kind.__module__}:{kind.__name__}" for kind in (Calculator, Guess, Faulty)}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculates(text: str) -> str:
    """Calls the tool first, then answers with the tool's result."""
    return "so it is 3" if "<tool_response>" in text else call("add", a=1, b=2)


async def test_a_class_written_for_trl_runs_unchanged() -> None:
    async with served(Calculator, calculates) as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator]))
        assert (episode.status, episode.stop_reason, episode.reward) == ("ok", "done", 1.0)
        assert episode.answer == "so it is 3"
        assert episode.metrics["turns"] == 2
        assert (episode.metrics["tool_calls"], episode.metrics["tool_errors"]) == (1, 0)
        (sequence,) = episode.sequences
        text = server.engine.tokenizer.decode(sequence.prompt_ids)
        assert "1+2? Use the tool.<|im_end|>" in text, "what reset returns is added to the problem"
        assert '"name": "add"' in text
        assert '"description": "The first number."' in text
        assert "get_reward" not in text
        sampled = sequence.token_ids[sequence.mask == 1].tolist()
        tokenizer = server.engine.tokenizer
        assert sampled == letters(tokenizer, call("add", a=1, b=2)) + letters(
            tokenizer, "so it is 3"
        )
        assert "<tool_response>\n3\n</tool_response>" in sequence.text
        assert sequence.weight_versions == [(3, 0, len(sequence.token_ids))]


async def test_every_episode_of_a_group_has_its_own_environment_and_seed() -> None:
    async with served(Calculator, calculates) as server:
        episodes = await server.client.episodes(request_for(NAMES[Calculator], n=3))
        assert [episode.id for episode in episodes] == ["r1-0", "r1-1", "r1-2"]
        seeds = [body["sampling_params"]["sampling_seed"] for body in server.engine.asked]
        assert len(set(seeds)) == 6


async def test_an_episode_that_changes_its_columns_changes_nothing_for_its_siblings() -> None:
    async with served(Deck, lambda _: "done") as server:
        request = request_for(server.service.runner.name, n=3)
        request.task.columns["cards"] = [[1], [2]]
        episodes = await server.client.episodes(request)
        assert [episode.reward for episode in episodes] == [3.0, 3.0, 3.0]


class Deck:
    """Draws the cards of its row, and keeps what it drew from."""

    def reset(self, cards: list[list[int]]) -> None:
        """Draws all cards."""
        self.sum = 0
        while cards:
            self.sum += cards.pop().pop()

    def get_reward(self) -> float:
        """Returns the sum of the cards."""
        return float(self.sum)


async def test_several_turns_without_tools() -> None:
    guesses = iter(["1", "2", "3"])
    Guess.closed.clear()
    async with served(Guess, lambda _: next(guesses)) as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Guess]))
        assert (episode.reward, episode.components) == (0.25, {"found": 1.0, "guesses": -0.75})
        assert Guess.closed == ["3"]
        assert len(episode.sequences[0].turns) == 3


async def test_answer_without_get_reward_is_left_to_be_graded() -> None:
    async with served(Ungraded, lambda _: "7") as server:
        (episode,) = await server.client.episodes(request_for(server.service.runner.name))
        assert (episode.status, episode.reward, episode.answer) == ("ok", None, "7")


class Ungraded:
    """Has a problem but no reward."""

    def reset(self) -> None:
        """Begins."""


TOLD = {
    "unknown tool": (
        call("multiply", a=1, b=2),
        "error: there is no tool multiply; the tools are: add, broken",
    ),
    "wrong arguments": (call("add", a=1), "error: add: missing a required argument: 'b'"),
    "further argument": (
        call("add", a=1, b=2, c=3),
        "error: add: got an unexpected keyword argument 'c'",
    ),
    "tool raises": (call("broken"), "error: RuntimeError: out of order"),
    "private": (call("__init__"), "error: there is no tool __init__"),
    "reward": (call("get_reward"), "error: there is no tool get_reward"),
    "no JSON": (
        '<tool_call>\n{"name": add}\n</tool_call>',
        "The tool call could not be read. the tool call is not JSON",
    ),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', "the tool call has no name"),
}


@pytest.mark.parametrize(("sampled", "told"), TOLD.values(), ids=TOLD)
async def test_model_is_told_what_is_wrong_with_its_call(sampled: str, told: str) -> None:
    answers = iter([sampled, call("add", a=1, b=2), "3"])
    async with served(Calculator, lambda _: next(answers)) as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator]))
        assert told in episode.sequences[0].text
        assert (episode.reward, episode.metrics["tool_errors"]) == (1.0, 1)


LOST = {
    "reset": ("error", "reset raised ValueError: no such task"),
    "lost": ("died", "its machine is gone"),
    "nan": ("error", "get_reward returned nan"),
}


@pytest.mark.parametrize(
    ("mode", "status", "detail"), [(mode, *rest) for mode, rest in LOST.items()], ids=LOST
)
async def test_a_failure_has_a_name_and_no_reward(mode: str, status: str, detail: str) -> None:
    async with served(Faulty, lambda _: "done") as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Faulty], mode))
        assert (episode.status, episode.reward, episode.sequences) == (status, None, [])
        assert detail in episode.detail
        assert server.service.stats()["episodes"][status] == 1


async def test_an_environment_that_died_is_run_again() -> None:
    Faulty.lives = 0
    async with served(Faulty, lambda _: "done") as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Faulty], "lost once"))
        assert (episode.status, episode.reward, Faulty.lives) == ("ok", 1.0, 1)


async def test_engine_failure_has_status_died_and_no_reward() -> None:
    async with served(Calculator, calculates) as server:
        server.engine.failures = 3
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator]))
        assert (episode.status, episode.reward) == ("died", None)
        assert "the engines did not answer" in episode.detail
        server.engine.failures = 1
        await server.client.delete("r1")
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator]))
        assert (episode.status, episode.reward) == ("ok", 1.0)


async def test_a_tool_that_hangs_is_a_timeout_without_a_reward() -> None:
    Faulty.release.clear()
    async with served(Faulty, lambda _: call("wait")) as server:
        try:
            (episode,) = await server.client.episodes(request_for(NAMES[Faulty], deadline_s=0.2))
        finally:
            Faulty.release.set()
        assert (episode.status, episode.stop_reason, episode.reward) == (
            "timeout",
            "deadline",
            None,
        )


async def test_the_time_of_busy_engines_is_not_that_of_an_episode() -> None:
    async with served(Calculator, calculates) as server:
        loop = asyncio.get_running_loop()
        server.engine.waits = lambda: leap(100, loop)
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator], deadline_s=60))
        assert (episode.status, episode.reward) == ("ok", 1.0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"turns": 1}, "turns"), ({"tool_calls": 1}, "tool_calls"), ({"context": 700}, "context")],
)
async def test_a_limit_is_a_stop_reason_with_a_reward(limits: dict[str, Any], reason: str) -> None:
    async with served(Calculator, lambda _: call("add", a=1, b=2)) as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Calculator], **limits))
        assert (episode.status, episode.stop_reason, episode.reward) == ("ok", reason, 1.0)
        assert episode.sequences[0].finish_reason == "length", (
            "so algorithm.mask_truncated decides whether it is trained"
        )


async def test_observation_of_ten_megabytes_ends_the_context() -> None:
    async with served(Faulty, lambda _: call("huge")) as server:
        (episode,) = await server.client.episodes(request_for(NAMES[Faulty], "x"))
        assert (episode.status, episode.stop_reason, episode.reward) == ("ok", "context", 1.0)


async def test_a_request_sent_again_gets_the_same_episodes() -> None:
    async with served(Calculator, calculates) as server:
        request = request_for(NAMES[Calculator], n=2)
        one, other = await asyncio.gather(
            server.client.episodes(request), server.client.episodes(request)
        )
        third = await server.client.episodes(request)
        assert codec.encode(one) == codec.encode(other) == codec.encode(third)
        assert len(server.engine.asked) == 4
        with raises(ServiceError, status=409, field="request_id"):
            await server.client.episodes(request_for(NAMES[Calculator], "other", n=2))


async def test_deleting_a_request_ends_its_episodes_and_their_sessions() -> None:
    begun = asyncio.Event()
    never = asyncio.Event()

    class Slow(Calculator):
        async def wait(self) -> str:
            """Waits."""
            begun.set()
            await never.wait()
            return ""

    environment = Environment.of(Slow, "python:slow:Slow")
    async with served(Calculator, lambda _: call("wait")) as server:
        server.service.runner = ClassRunner(environment, 1)
        running = asyncio.create_task(server.client.episodes(request_for("python:slow:Slow")))
        await begun.wait()
        assert len(server.service._sessions) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(400):
            stats = server.service.stats()
            while stats["sessions"] or stats["running"]:
                await asyncio.sleep(0.01)
                stats = server.service.stats()
        with raises(ServiceError, status=404, field="request_id"):
            await server.client.delete("r1")


async def test_waiting_caller_is_told_that_its_request_was_deleted() -> None:
    async with served(Faulty, lambda _: call("wait")) as server:
        Faulty.release.clear()
        waiting = asyncio.create_task(server.service.episodes(request_for(NAMES[Faulty])))
        while not server.service.stats()["sessions"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.service.delete("r1")
        with raises(ServiceError, status=503, field="request_id"):
            await waiting
        Faulty.release.set()


class Graded(Guess):
    """Rewards every guess."""

    def get_turn_rewards(self) -> list[Any]:
        """Returns a reward for every turn, or an invalid value for some problems."""
        if self.wanted == "9":
            return [0.5]
        return (
            [0.25 * i for i in range(self.guesses)]
            if self.wanted != "8"
            else [math.nan] * self.guesses
        )


async def test_rewards_of_single_answers_are_on_their_turns_and_in_the_reward() -> None:
    async with served(Graded, lambda text: str(text.count("higher") + 1)) as server:
        (episode,) = await server.client.episodes(
            request_for(f"python:{__name__}:Graded", truth="3")
        )
        (sequence,) = episode.sequences
        assert [turn.reward for turn in sequence.turns] == [0.0, 0.25, 0.5]
        assert episode.reward == 1.0 - 0.25 * 3 + 0.75
        assert episode.components == {"found": 1.0, "guesses": -0.75}


@pytest.mark.parametrize(
    ("truth", "reason"), [("9", "a number for each of the"), ("8", "a finite number")]
)
async def test_wrong_rewards_of_answers_are_an_error(truth: str, reason: str) -> None:
    async with served(Graded, lambda text: str(text.count("higher") + 1)) as server:
        (episode,) = await server.client.episodes(
            request_for(f"python:{__name__}:Graded", truth=truth, turns=20)
        )
        assert (episode.status, episode.reward) == ("error", None)
        assert "get_turn_rewards returned" in episode.detail
        assert reason in episode.detail


async def test_the_server_forgets_answers_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_REMEMBERED_S", 0.01)
    async with served(Calculator, calculates) as server:
        await server.client.episodes(request_for(NAMES[Calculator]))
        while server.service._requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_json_and_msgpack_carry_the_same() -> None:
    async with served(Calculator, calculates) as server:
        body = request_for(NAMES[Calculator]).model_dump()
        plain = (await server.http.post("/episodes", json=body)).json()
        packed = await server.http.post("/episodes", json=body, headers={"accept": codec.MSGPACK})
        assert codec.encode(codec.from_plain(plain, Episodes)) == packed.content


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "task.env": (
        {"task": {"env": "python:os:system", "prompt": "x"}},
        "there is no such environment",
    ),
    "n": ({"n": 0}, "greater than 0"),
    "request_id": ({"request_id": "../x"}, "match"),
    "sampling.max_new_tokens": ({"sampling": {"max_new_tokens": 0}}, "greater than 0"),
    "limits.turns": ({"limits": {"turns": 0}}, "greater than 0"),
    "limits.steps": ({"limits": {"steps": 3}}, "there is no such field"),
}


@pytest.mark.parametrize("field", BAD)
async def test_bad_requests_are_refused_with_the_field(field: str) -> None:
    async with served(Calculator, calculates) as server:
        change, reason = BAD[field]
        answer = await server.http.post(
            "/episodes", json=request_for(NAMES[Calculator]).model_dump() | change
        )
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["field"] == field
        assert reason in error["message"]


async def test_messages_that_cannot_begin_an_episode_are_an_error_with_the_field() -> None:
    async with served(Calculator, calculates) as server:
        request = request_for(NAMES[Calculator])
        request.task.messages = [{"role": "wizard", "content": "x"}]
        (episode,) = await server.client.episodes(request)
        assert (episode.status, episode.reward) == ("error", None)
        assert "task.messages[0].role" in episode.detail


async def test_served_environment_is_listed() -> None:
    async with served(Calculator, calculates) as server:
        (listed,) = (await server.http.get("/environments")).json()
        assert [tool["function"]["name"] for tool in listed["tools"]] == ["add", "broken"]
        assert (listed["has_reward"], listed["has_steps"]) == (True, False)
        assert listed["gives_verdicts"] is False
        stats = (await server.http.get("/stats")).json()
        assert stats["episodes"] == {"ok": 0, "timeout": 0, "died": 0, "error": 0}
        assert (await server.http.get("/health")).json()["status"] == "healthy"


class NoReset:
    """Lacks the only mandatory method."""


class Undescribed:
    """Has a tool without a description."""

    def reset(self) -> None:
        """Begins."""

    def act(self, x) -> None:  # type: ignore[no-untyped-def]
        """Acts."""


class Step:
    """TRL takes `step` as a tool."""

    def reset(self) -> None:
        """Begins."""

    def step(self, direction: str) -> str:
        """Walks.

        Args:
            direction: Where to.
        """
        return direction


class Close:
    """TRL takes `close` as a tool."""

    def reset(self) -> None:
        """Begins."""

    def close(self, door: int) -> str:
        """Closes a door.

        Args:
            door: Its number.
        """
        return f"{door} is closed"


class TurnRewards:
    """TRL takes `get_turn_rewards` as a tool."""

    def reset(self) -> None:
        """Begins."""

    def get_turn_rewards(self, turn: int) -> str:
        """Says what a turn is worth.

        Args:
            turn: Its number.
        """
        return f"{turn}"


def logged(function: Any) -> Any:
    """Wraps a coroutine function in one that is none."""

    @functools.wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return wrapped


class Kinds:
    """Has tools of every kind."""

    def reset(self) -> None:
        """Begins."""

    @staticmethod
    def static(a: int) -> int:
        """Doubles.

        Args:
            a: A number.
        """
        return 2 * a

    @classmethod
    def of_class(cls, a: int) -> str:
        """Names the class.

        Args:
            a: A number.
        """
        return f"{cls.__name__} {a}"

    @logged
    async def later(self, a: int) -> str:
        """Takes its time.

        Args:
            a: A number.
        """
        await asyncio.sleep(0)
        return f"later {a}"


@pytest.mark.parametrize(
    ("tool", "result"), [("static", "42"), ("of_class", "Kinds 21"), ("later", "later 21")]
)
async def test_methods_of_every_kind_are_tools(tool: str, result: str) -> None:
    def reply(text: str) -> str:
        return "done" if "<tool_response>" in text else call(tool, a=21)

    async with served(Kinds, reply) as server:
        schema = server.service.runner.tools[tool]["function"]["parameters"]
        assert list(schema["properties"]) == ["a"]
        (episode,) = await server.client.episodes(request_for(server.service.runner.name))
        assert f"<tool_response>\n{result}\n</tool_response>" in episode.sequences[0].text


WRONG = {
    f"python:{__name__}:Step": f"python:{__name__}:Step.step",
    f"python:{__name__}:Close": f"python:{__name__}:Close.close",
    f"python:{__name__}:TurnRewards": f"python:{__name__}:TurnRewards.get_turn_rewards",
    "gym:CartPole": "gym:CartPole",
    "python:tests.support.environments.environments:Nothing": (
        "tests.support.environments.environments:Nothing"
    ),
    "python:no_such_package:Class": "no_such_package:Class",
    f"python:{__name__}:NoReset": f"python:{__name__}:NoReset",
    f"python:{__name__}:Undescribed": f"python:{__name__}:Undescribed.act",
    "python:json:dumps": "python:json:dumps",
}
"""Names of environments, and what the error says is wrong."""


@pytest.mark.parametrize(("name", "value"), WRONG.items(), ids=WRONG)
def test_a_wrong_environment_is_refused(name: str, value: str) -> None:
    with raises(ConfigError, field="environment.name", value=value):
        load_runner(EnvironmentSection.model_construct(name=name, workers=1), "", RuntimeSection())


PROGRAMS = {
    "prints": ("print(2**100)", "1267650600228229401496703205376"),
    "prints nothing": ("x = 1", "(nothing was printed)"),
    "raises": ("print(1)\n1/0", "error: ZeroDivisionError: division by zero"),
    "no Python": ("print(", "error: SyntaxError"),
    "opens a file": ("open('/etc/passwd')", "error: "),
    "keeps nothing": ("print('x' in globals())", "False"),
}


@pytest.mark.integration
async def test_the_built_in_tool_runs_programs_in_the_sandbox() -> None:
    asked = iter(PROGRAMS.values())
    texts = {name: f"<tool_response>\n{shown}" for name, (_, shown) in PROGRAMS.items()}
    replies = iter([*(call("python", code=code) for code, _ in asked), "done"])
    async with served("python", lambda _: next(replies)) as server:
        (episode,) = await server.client.episodes(request_for("python"))
        assert (episode.status, episode.reward, episode.answer) == ("ok", None, "done"), (
            episode.detail
        )
        missing = [name for name, text in texts.items() if text not in episode.sequences[0].text]
        assert missing == [], episode.sequences[0].text


class Judged(Calculator):
    """Declares verdicts, but gives rewards for single answers too."""

    gives_verdicts = True

    def get_turn_rewards(self) -> list[float]:
        """Half a point for the only answer."""
        return [0.5]


async def test_a_reward_that_is_no_verdict_is_an_error_where_verdicts_are_declared() -> None:
    async with served(Judged, lambda _: "3") as server:
        (episode,) = await server.client.episodes(request_for(server.service.runner.name))
        assert (episode.status, episode.reward) == ("error", None)
        assert "gives_verdicts" in episode.detail
