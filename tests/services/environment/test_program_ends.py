"""What an episode of a program comes to, for every way in which the program can end.

The program, its container and its HTTP server are stand-ins; the rules are written anew.
"""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.process.topology import WRONG_SETTING
from common.settings.sections import RuntimeSection
from common.wire.schemas import EpisodeTask
from services.environment import program_runner, supervisor
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.program_runner import ProgramRunner

URL = "http://gateway.example/base"
_NEVER = object()
REWARDS = st.sampled_from([None, b"1.5", b'{"a": 1, "b": 0.5}', b"no json", b'"text"', b"NaN"])


class Ends:
    """A session and a program's container, of which the test says how they end."""

    def __init__(
        self,
        *,
        status: object = 0,
        graded: bool = False,
        stop_reason: str = "",
        unanswered: bool = False,
        written: bytes | None = None,
        is_late: bool = True,
        output: str = "",
    ) -> None:
        self.id = "key"
        self.directory = "/folder"
        self.graded = asyncio.Event()
        if graded:
            self.graded.set()
        self.stop_reason = stop_reason
        self.asked_at = 7.0
        self.closed = False
        self._status = status
        self._unanswered = unanswered
        self._written = written
        self._is_late = is_late
        self._output = output
        self.started: list[Any] = []
        self.killed = False
        self.requests = self

    def fault(self, is_graded: bool) -> str:
        assert is_graded == self.graded.is_set()
        return "no answer" if self._unanswered else ""

    def close(self) -> None:
        self.closed = True

    async def exec(self, words: Any, env: Any, *, stdin: bytes) -> Any:
        self.started.append((list(words), env, json.loads(stdin)))
        return SimpleNamespace(wait=self._wait, close=self._end)

    async def _wait(self) -> object:
        if self._status is _NEVER:
            await asyncio.Event().wait()
        return self._status

    async def _end(self) -> str:
        self.killed = True
        return self._output

    async def read(self, path: str, after: float = 0.0) -> bytes | None:
        assert path == "/folder/reward.json"
        assert after in (0.0, 7.0)
        return None if after and not self._is_late else self._written


def runner(name: str = "agent:prog 'the {prompt}' {prompt}!", **more: Any) -> ProgramRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_runner, "words_of", lambda text, is_here: text.split())
        return ProgramRunner(
            name,
            name.partition(":")[2],
            slots=1,
            gateway=URL,
            section=RuntimeSection(),
            **more,
        )


CONTENT = {
    "prompt": "hi",
    "session": {"openai_base_url": "o", "anthropic_base_url": "a", "api_key": "k", "url": "u"},
}


def is_reward(written: bytes | None) -> bool:
    return written in (b"1.5", b'{"a": 1, "b": 0.5}')


def is_json(written: bytes) -> bool:
    return written != b"no json"


@given(
    status=st.sampled_from([0, 1, 127, 137]),
    graded=st.booleans(),
    stop_reason=st.sampled_from(["", "turns"]),
    unanswered=st.booleans(),
    written=REWARDS,
    is_late=st.booleans(),
    output=st.sampled_from(["", "x" * 1001]),
    plays_tasks=st.booleans(),
)
def test_a_command(plays_tasks: bool, **ends: Any) -> None:
    async def play() -> object:
        session = Ends(**ends)
        played = runner(plays_tasks=plays_tasks)
        container: Any = session
        try:
            reward = await played._reward_of(container, CONTENT, container)
        except (EnvironmentLost, EpisodeFailed) as error:
            return error
        finally:
            assert session.killed
            ((words, env, given),) = session.started
            assert words == ["prog", "'the", "hi'", "hi!"]
            assert given == CONTENT
            assert env == {
                "OPENAI_BASE_URL": "o",
                "OPENAI_API_BASE": "o",
                "OPENAI_API_KEY": "k",
                "ANTHROPIC_BASE_URL": "a",
                "ANTHROPIC_API_KEY": "k",
                "EPISODE_URL": "u",
                "EPISODE_DIR": "/folder",
                "EPISODE_REWARD_FILE": "/folder/reward.json",
            }
        assert session.closed, "nothing is sampled any more when it is graded"
        return reward

    found = asyncio.run(play())
    status = ends["status"]
    written = ends["written"]
    was_killed = status > 128
    is_whole = is_reward(written) and ends["is_late"]
    if status and not ends["graded"] and not (was_killed and is_whole) and not ends["stop_reason"]:
        if ends["unanswered"]:
            assert type(found) is EnvironmentLost
            assert str(found) == "no answer"
            return
        assert type(found) is (EnvironmentLost if was_killed else EpisodeFailed)
        assert str(found).startswith("prog ")
        shown = str(found).partition("; the end of its output: ")[2]
        assert shown == ends["output"][-1000:]
    elif ends["unanswered"]:
        assert type(found) is EnvironmentLost
        assert str(found) == "no answer"
    elif plays_tasks or written is None:
        assert found is None
    elif not is_json(written):
        assert type(found) is EpisodeFailed
        assert "the reward file is not JSON: 'no json'" in str(found)
    else:
        assert repr(found) == repr(json.loads(written))


@given(
    status=st.sampled_from([200, 299, 300, 404, 499, 500, 503]),
    content=st.sampled_from([b"", b" \n", b"1.5", b"no json"]),
    graded=st.booleans(),
    is_hanging=st.booleans(),
    is_broken=st.booleans(),
    stop_reason=st.sampled_from(["", "turns"]),
    unanswered=st.booleans(),
)
def test_a_server(
    status: int,
    content: bytes,
    graded: bool,
    is_hanging: bool,
    is_broken: bool,
    stop_reason: str,
    unanswered: bool,
) -> None:
    is_hanging = is_hanging and graded
    left = asyncio.Event()

    async def post(url: str, given: Any) -> httpx.Response:
        assert (url, given) == ("http://here", CONTENT)
        if is_hanging:
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
        if is_broken:
            raise httpx.ReadError("broken")
        return httpx.Response(status, content=content)

    async def play() -> object:
        session: Any = Ends(graded=graded, stop_reason=stop_reason, unanswered=unanswered)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program_runner, "_post", post)
            try:
                reward = await runner()._post_task("http://here", CONTENT, session)
            except (EnvironmentLost, EpisodeFailed) as error:
                return error
            finally:
                await asyncio.sleep(0)
                assert left.is_set() == is_hanging, "nobody waits for it any more"
        assert session.closed
        return reward

    found = asyncio.run(play())
    has_failed = status >= 300
    if not is_hanging and is_broken:
        assert type(found) is EnvironmentLost
        assert str(found) == "http://here did not answer: ReadError broken"
    elif unanswered:
        assert type(found) is EnvironmentLost
        assert str(found) == "no answer"
    elif is_hanging or (stop_reason and has_failed):
        assert found is None
    elif has_failed:
        assert type(found) is (EnvironmentLost if status >= 500 else EpisodeFailed)
        assert str(found) == f"http://here answered {status}: {content.decode()}"
    elif not content.strip():
        assert found is None
    elif content == b"1.5":
        assert found == 1.5
    else:
        assert type(found) is EpisodeFailed
        assert "the answer of http://here is not JSON" in str(found)


def test_a_program_that_goes_on_after_its_reward_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runner, "GRACE_S", 0.001)

    async def play() -> None:
        session: Any = Ends(status=_NEVER, graded=True, written=b"2")
        assert await runner()._reward_of(session, CONTENT, session) == 2
        assert session.killed

    asyncio.run(play())


_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system"]),
            "content": st.sampled_from(["one", "two", [{"type": "text", "text": "part"}]]),
        }
    ),
    max_size=3,
)


@given(st.sampled_from(["", "a prompt"]), _MESSAGES)
def test_the_task_that_a_program_gets(prompt: str, messages: list[dict[str, Any]]) -> None:
    task = EpisodeTask(
        env="e",
        prompt=prompt,
        messages=messages,
        ground_truth="truth",
        columns={"level": 3},
        seed=5,
    )
    session: Any = SimpleNamespace(id="key")
    found = runner()._task(task, session)
    texts = [
        each["content"]
        for each in messages
        if each["role"] == "user" and isinstance(each["content"], str)
    ]
    shown = prompt or (texts[-1] if texts else "")
    base = f"{URL}/sessions/key"
    assert found == {
        "prompt": shown,
        "messages": messages or [{"role": "user", "content": shown}],
        "ground_truth": "truth",
        "columns": {"level": 3},
        "seed": 5,
        "session": {
            "url": base,
            "openai_base_url": f"{base}/v1",
            "anthropic_base_url": base,
            "api_key": "key",
        },
    }


_LIVES = st.lists(
    st.tuples(
        st.sampled_from([1, 7, -9, 0, WRONG_SETTING]),
        st.sampled_from([1.0, 60.0, 61.0]),
    ),
    max_size=9,
)
"""Status and seconds of a server, every time that it is started."""


@given(_LIVES, st.integers(0, 8), st.sampled_from(["never", "starts", "runs", "pauses"]))
def test_a_server_is_started_again_until_it_fails_too_often(
    lives: list[tuple[int, float]], stopped_at: int, moment: str
) -> None:
    """`moment`: what the supervisor does when both signals arrive."""
    lives = [*lives, (0, 1.0)]
    handlers: dict[int, Any] = {}
    slept: list[float] = []
    started: list[Any] = []
    signals: list[int] = []
    now = 0.0
    is_pausing = False

    class Server:
        def __init__(self, command: list[str], stdin: int, env: dict[str, str]) -> None:
            assert (command, stdin) == (["server"], subprocess.PIPE)
            assert env.pop(supervisor.VARIABLE) == "1"
            assert env == {"A": "b"}
            started.append(self)
            signalled("starts")

        def wait(self) -> int:
            nonlocal now
            status, seconds = lives[len(started) - 1]
            now += seconds
            signalled("runs")
            return status

        def send_signal(self, number: int) -> None:
            # Nothing is sent to a process that has ended.
            if self is started[-1] and not is_pausing:
                signals.append(number)

    def signalled(now_it: str) -> None:
        if (now_it, len(started) - 1) == (moment, stopped_at):
            for number in (signal.SIGTERM, signal.SIGINT):
                handlers[number](number, None)

    def sleep(seconds: float) -> None:
        nonlocal is_pausing
        slept.append(seconds)
        is_pausing = True
        signalled("pauses")
        is_pausing = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Server)
        patch.setattr(signal, "signal", handlers.__setitem__)
        patch.setattr(time, "monotonic", lambda: now)
        patch.setattr(time, "sleep", sleep)
        patch.setattr(os, "environ", {"A": "b"})
        status = supervisor.keep_alive(["server"])

    failures = 0
    pauses: list[float] = []
    for number, (ended, seconds) in enumerate(lives):
        # A server that lived for more than a minute begins to count anew.
        failures = 1 if seconds > 60.0 else failures + 1
        # A signal in the pause is the next server's.
        is_stopped = moment != "never" and number == stopped_at + (moment == "pauses")
        if ended in (0, WRONG_SETTING) or failures == 5 or is_stopped:
            break
        pauses.append(min(8.0, 0.5 * 2**failures))
    assert status == (ended if ended >= 0 else 128 - ended)
    assert (len(started), slept) == (number + 1, pauses)
    # Of several that arrive before it has been started, the last one counts.
    assert signals == ([15, 2] if moment == "runs" else [2]) * is_stopped


def test_the_end_of_the_supervisor_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's input is a pipe that the supervisor holds; nothing is ever read from it."""
    ended: list[int] = []
    watched: list[Any] = []
    duplicates: list[tuple[int, int]] = []
    reads = [b"x", b""]
    monkeypatch.setattr(os, "dup", lambda number: 100 + number)
    monkeypatch.setattr(os, "dup2", lambda *numbers: duplicates.append(numbers))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(
        threading,
        "Thread",
        lambda target, daemon: SimpleNamespace(start=lambda: watched.append((target, daemon))),
    )
    supervisor.end_with_parent()
    ((_, target),) = duplicates
    assert target == 0
    ((watch, daemon),) = watched
    assert daemon, "it must not keep the server alive"
    monkeypatch.setattr(os, "read", lambda number, _: reads.pop(0) if number else b"")
    watch()
    assert (ended, reads) == ([1], [])
