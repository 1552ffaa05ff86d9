"""What calls may ask for, by the rules of `docs/how-to/agents.md` written anew, and which calls are the
same; who reads a conversation of Anthropic's; programs that are ended."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, InvalidInput
from common.settings.sections import RuntimeSection
from services.environment import program_runner
from services.environment.app import _request_key
from services.environment.call_fields import check_fields, read_options
from services.environment.dialects import DIALECTS, read_call
from services.environment.program_runner import ProgramRunner
from services.environment.programs import RunningProgram
from services.environment.runtimes import sandboxed
from services.environment.runtimes.sandboxed import SandboxRuntime
from tests.support.errors import raises

BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
PATHS = st.sampled_from(list(BY_PATH))
NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "frequency_penalty": (0, 0.0),
    "function_call": (),
    "functions": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
    "logit_bias": ({},),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "output_format": ("text", {"type": "text"}),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "previous_response_id": ("",),
    "response_format": ({"type": "text"},),
    "seed": (),
    "store": (False,),
    "thinking": ({"type": "adaptive"},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""The values with which a field asks for nothing."""
OTHERS = (7, "other", ["x"], {"type": "other"}, {"type": "auto", "disable_parallel_tool_use": True})


def caught(function: Any, *given_: Any) -> InvalidInput | None:
    try:
        function(*given_)
    except InvalidInput as error:
        return error
    return None


@given(PATHS, st.sampled_from(list(NOTHING)), st.sampled_from([None, *OTHERS]))
def test_a_field_is_refused_unless_it_asks_for_nothing(path: str, name: str, other: Any) -> None:
    for value in NOTHING[name]:
        check_fields({name: value}, path)
    error = caught(check_fields, {name: other}, path)
    if other is None:
        assert error is None
        return
    assert error is not None
    shown = InvalidInput("", field=name, value=other, remedy="")
    assert (error.field, error.value) == (name, shown.value)
    assert error.message
    assert error.remedy


@given(PATHS, st.sampled_from(["text", "output_config"]), st.sampled_from([None, "text", *OTHERS]))
def test_the_format_of_an_answer_is_text(path: str, parent: str, kind: Any) -> None:
    is_known = (parent == "text") == (path == "responses") and path != "chat/completions"
    error = caught(check_fields, {parent: {"format": kind}}, path)
    if not is_known:
        assert error is not None
        assert (error.field, error.value) == ("body", parent), "no field of this API"
    elif kind in (None, "text"):
        assert error is None
    else:
        assert error is not None
        assert error.field == f"{parent}.format"


LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
BAD_LENGTHS: tuple[Any, ...] = (0, -1, True, "5", 1.5, [])
TEXTS = st.lists(st.sampled_from(["a", "b" * 1000]), max_size=6)
BAD_STOPS = ("", ["a", ""], ["x" * 1001], [7], 7, {"a": 1})


@given(
    st.dictionaries(st.sampled_from(LENGTHS), st.none() | st.integers(1, 9)),
    st.none() | TEXTS | st.just("one"),
    st.none() | TEXTS,
)
def test_the_shortest_length_and_all_stop_texts_count(
    lengths: dict[str, Any], stop: Any, sequences: Any
) -> None:
    body = {**lengths, "stop": stop, "stop_sequences": sequences}
    if isinstance(stop, list) and len(stop) > 4:
        error = caught(read_options, body)
        assert error is not None
        assert error.field == "stop"
        assert "up to 4 texts of 1 to 1000" in str(error)
        return
    found = read_options(body)
    given_ = [each for each in lengths.values() if each is not None]
    assert found.max_tokens == (min(given_) if given_ else None)
    one = [stop] if isinstance(stop, str) else stop or []
    assert found.stop == (*one, *(sequences or []))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("value", BAD_LENGTHS, ids=repr)
def test_a_length_is_a_whole_number(name: str, value: Any) -> None:
    with raises(InvalidInput, field=name, value=str(value)):
        read_options({name: value})


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
@pytest.mark.parametrize("value", BAD_STOPS, ids=repr)
def test_stop_texts_are_texts(name: str, value: Any) -> None:
    error = caught(read_options, {name: value})
    assert error is not None
    shown = InvalidInput("", field=name, value=value, remedy="")
    assert (error.field, error.value) == (name, shown.value)
    assert read_options({"stop_sequences": ["a"] * 256}).stop == ("a",) * 256
    assert caught(read_options, {"stop_sequences": ["a"] * 257})


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@given(JSON, JSON, PATHS, PATHS)
def test_two_calls_are_the_same_if_they_ask_one_api_for_the_same(
    one: Any, other: Any, path: str, other_path: str
) -> None:
    def shown(body: Any) -> str:
        return json.dumps(body, sort_keys=True)

    keys = _request_key(one, BY_PATH[path]), _request_key(other, BY_PATH[other_path])
    assert (keys[0] == keys[1]) == ((shown(one), path) == (shown(other), other_path))
    if isinstance(one, dict):
        turned = dict(reversed(one.items()))
        assert _request_key(turned, BY_PATH[path]) == keys[0]


TURNS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=3), st.sampled_from(["", "hm"]), st.integers(0, 2)
    ),
    min_size=1,
    max_size=3,
)


@given(TURNS, st.sampled_from(["", "Be kind."]), st.booleans())
def test_a_conversation_of_anthropics(turns: list[Any], system: str, is_parts: bool) -> None:
    messages: list[dict[str, Any]] = []
    expected: list[tuple[str, str, str, list[str]]] = []
    if system:
        expected.append(("system", system, "", []))
    for number, (text, thought, calls) in enumerate(turns):
        asked: Any = [{"type": "text", "text": each} for each in text] if is_parts else text
        messages.append({"role": "user", "content": asked})
        expected.append(("user", text, "", []))
        names = [f"t{number}-{i}" for i in range(calls)]
        blocks: list[Any] = [{"type": "thinking", "thinking": thought}] if thought else []
        blocks.append({"type": "text", "text": text})
        for name in names:
            blocks.append({"type": "tool_use", "id": name, "name": "f", "input": {"x": name}})
        messages.append({"role": "assistant", "content": blocks})
        expected.append(("assistant", text, thought, names))
        results = [
            {"type": "tool_result", "tool_use_id": name, "content": f"got {name}"} for name in names
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "on"}]})
        expected += [("tool", f"got {name}", "", []) for name in names]
        expected.append(("user", "on", "", []))
    parts: Any = [{"type": "text", "text": system}] if is_parts else system
    body = {"model": "m", "messages": messages, "system": parts if system else None}
    read = read_call(body, BY_PATH["messages"]).messages
    found = [
        (each.role, each.content, each.reasoning, [call["id"] for call in each.tool_calls])
        for each in read
    ]
    assert found == expected
    for message in read:
        for call in message.tool_calls:
            assert call["function"] == {"name": "f", "arguments": {"x": call["id"]}}


async def test_whoever_ends_a_program_waits_until_all_of_it_has_ended() -> None:
    ends = asyncio.Event()
    begun: list[int] = []
    program = RunningProgram.__new__(RunningProgram)
    program.output = SimpleNamespace(text=b"  the end \xff\n")  # type: ignore[assignment]

    async def end(grace_s: float = 0.0) -> int:
        begun.append(1)
        await ends.wait()
        return 0

    program.end = end  # type: ignore[method-assign]
    closing = [asyncio.create_task(program.close()) for _ in range(2)]
    cancelled = asyncio.create_task(program.close())
    for _ in range(5):
        await asyncio.sleep(0)
    cancelled.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(each.done() for each in closing)
    assert cancelled.cancelled()
    ends.set()
    assert await asyncio.gather(*closing) == ["the end \ufffd"] * 2
    assert begun == [1], "it is ended once"


@pytest.mark.parametrize("kind", ["docker", "kubernetes", "sandbox"])
def test_a_server_for_all_episodes_needs_this_machine(kind: str) -> None:
    section = RuntimeSection.model_validate({"kind": kind})
    with raises(ConfigError, field="runtime.kind", value=kind):
        ProgramRunner("agent:x", "true {port}", slots=1, gateway="", section=section)


@pytest.mark.parametrize("target", ["true {port}", "http://agents.example/run"])
async def test_a_server_of_the_user_gets_its_own_address(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Server:
        def __init__(self, *given_: Any) -> None:
            made.append(given_)

        async def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(program_runner, "UserServer", Server)
    section = RuntimeSection()
    runner = ProgramRunner("agent:x", target, slots=1, gateway="http://g", section=section)
    assert made == [("agent:x", target, "/run")]
    assert runner._runtime.gateway == "http://g"
    await runner.close()
    assert made[1:] == ["closed"]


def test_a_machine_without_a_sandbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ConfigError("no bwrap", field="other", value="x", remedy="install it")

    for name in ("base_filter", "find_bwrap", "interpreters"):
        with monkeypatch.context() as patch:
            for each in ("base_filter", "find_bwrap", "interpreters"):
                patch.setattr(sandboxed, each, lambda *_, **__: [])
            patch.setattr(sandboxed, name, missing)
            with raises(ConfigError, field="runtime.kind", value="sandbox"):
                SandboxRuntime(RuntimeSection(), "http://127.0.0.1:1")
