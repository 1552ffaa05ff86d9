"""The gateway's three APIs: a conversation with a tool in each, keys, streams, and calls to ended
sessions."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.environment.session import Session
from tests.support.environments.environments import Calculator, Served, request_for, served
from tests.support.models.trap_models import letters
from tests.support.paths import ROOT

NAME = f"python:{Calculator.__module__}:Calculator"
CALL = (
    "<think>\nadd them\n</think>\n\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def replies(text: str) -> str:
    return "it is 3" if "<tool_response>" in text else CALL


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Served, Session]]:
    async with served(Calculator, replies) as server:
        yield server, server.service.open_session(request_for(NAME))


async def post(
    server: Served, session: Session, path: str, body: Any, key: str | None = None
) -> httpx.Response:
    headers = {"authorization": f"Bearer {session.id if key is None else key}"}
    return await server.http.post(f"/sessions/{session.id}/v1/{path}", json=body, headers=headers)


def one_sequence(server: Served, session: Session) -> None:
    """Asserts that the conversation was recorded as a single sequence of the sampled tokens."""
    session.close()
    (sequence,) = session.sequences()
    tokenizer = server.engine.tokenizer
    assert sequence.token_ids[sequence.mask == 1].tolist() == letters(tokenizer, CALL) + letters(
        tokenizer, "it is 3"
    )
    assert len(sequence.turns) == 2


async def test_chat_completions_with_a_tool() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
        }
    ]
    async with opened() as (server, session):
        chat: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]
        first = (
            await post(
                server,
                session,
                "chat/completions",
                {"model": "m", "messages": chat, "tools": tools},
            )
        ).json()
        (choice,) = first["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert choice["message"]["reasoning_content"] == "add them"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        chat += [
            choice["message"],
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": [{"type": "text", "text": "3"}],
            },
        ]
        body = {"model": "m", "messages": chat, "tools": tools, "temperature": 0.1}
        second = (await post(server, session, "chat/completions", body)).json()
        assert second["choices"][0]["message"]["content"] == "it is 3"
        sampling = server.engine.asked[1]["sampling_params"]
        assert (sampling["temperature"], sampling["max_new_tokens"]) == (1.0, 300), (
            "the run's, not the program's"
        )
        usage = second["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + len(
            letters(server.engine.tokenizer, "it is 3")
        )
        one_sequence(server, session)


async def test_responses_with_a_tool() -> None:
    tools = [
        {
            "type": "function",
            "name": "add",
            "description": "Adds.",
            "parameters": SCHEMA,
            "strict": True,
        }
    ]
    async with opened() as (server, session):
        begin: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}
        ]
        first = (
            await post(server, session, "responses", {"model": "m", "input": begin, "tools": tools})
        ).json()
        thought, call = first["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "add them")
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call",
            "add",
            {"a": 1, "b": 2},
        )
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        body = {"model": "m", "input": [*begin, thought, call, result], "tools": tools}
        second = (await post(server, session, "responses", body)).json()
        assert second["status"] == "completed"
        assert second["output"][0]["content"][0]["text"] == "it is 3"
        one_sequence(server, session)


async def test_messages_with_a_tool() -> None:
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    async with opened() as (server, session):
        chat: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]
        body = {"model": "m", "max_tokens": 500, "messages": chat, "tools": tools}
        answer = await server.http.post(
            f"/sessions/{session.id}/v1/messages", json=body, headers={"x-api-key": session.id}
        )
        first = answer.json()
        thought, call = first["content"]
        assert (first["stop_reason"], thought["type"]) == ("tool_use", "thinking")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1, "b": 2})
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "3"}],
        }
        chat += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        second = (await post(server, session, "messages", body | {"messages": chat})).json()
        assert (second["stop_reason"], second["content"][0]["text"]) == ("end_turn", "it is 3")
        one_sequence(server, session)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_stream_is_written_from_the_whole_answer() -> None:
    async with opened() as (server, session):
        chat = [{"role": "user", "content": "1+2?"}, {"role": "user", "content": "<tool_response>"}]
        read: dict[str, Callable[[list[dict[str, Any]]], str]] = {
            "chat/completions": lambda found: found[0]["choices"][0]["delta"]["content"],
            "responses": lambda found: next(
                e["delta"] for e in found if e["type"] == "response.output_text.delta"
            ),
            "messages": lambda found: next(
                e["delta"]["text"] for e in found if e["type"] == "content_block_delta"
            ),
        }
        for path, text in read.items():
            body = {
                "model": "m",
                "stream": True,
                "input" if path == "responses" else "messages": chat,
            }
            answer = await post(server, session, path, body)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert text(events(answer.text)) == "it is 3"
        assert len(server.engine.asked) == 3


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}])
async def test_the_usage_ends_a_stream_of_chat_completions_only_where_it_is_asked_for(
    options: Any,
) -> None:
    async with opened() as (server, session):
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        if options is not None:
            body["stream_options"] = options
        found = events((await post(server, session, "chat/completions", body)).text)
        assert [bool(chunk["choices"]) for chunk in found[:2]] == [True, True]
        assert [bool(chunk.get("usage")) for chunk in found[2:]] == ([True] if options else [])


async def test_only_a_retry_replays_the_answer() -> None:
    async with opened() as (server, session):
        body = {"model": "m", "messages": [{"role": "user", "content": "1+2?"}]}
        for count, asked in (("0", 1), ("1", 1), (None, 2), ("0", 3), ("2", 3)):
            headers = {"x-api-key": session.id}
            if count is not None:
                headers["x-stainless-retry-count"] = count
            url = f"/sessions/{session.id}/v1/chat/completions"
            answer = await server.http.post(url, json=body, headers=headers)
            assert answer.status_code == 200
            assert len(server.engine.asked) == asked, count
        seeds = [each["sampling_params"]["sampling_seed"] for each in server.engine.asked]
        assert len(set(seeds)) == 3
        session.close()
        assert len(session.sequences()) == 3, "siblings, each trained"


@pytest.mark.parametrize("key", ["", "forged", "é", None])
async def test_a_forged_key_is_refused_before_anything_is_read(key: str | None) -> None:
    async with opened() as (server, session):
        headers = [(b"x-request-id", b"1")]
        if key is not None:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        answer = await server.http.post(
            f"/sessions/{session.id}/v1/messages", content=b"{", headers=headers
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert server.engine.asked == []


async def test_unknown_and_ended_sessions_are_refused() -> None:
    async with opened() as (server, session):
        body = {"messages": [{"role": "user", "content": "x"}]}
        headers = {"authorization": "Bearer other"}
        answer = await server.http.post(
            "/sessions/other/v1/chat/completions", json=body, headers=headers
        )
        assert answer.status_code == 404
        server.service.close_session(session)
        answer = await post(server, session, "chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_closed")


async def test_a_reward_call_ends_the_session() -> None:
    async with opened() as (server, session):
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await post(server, session, "chat/completions", body)).status_code == 200

        async def reward(given: Any, key: str = session.id) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = await server.http.post(
                f"/sessions/{session.id}/reward", json=given, headers=headers
            )
            return answer.status_code

        assert await reward(1.0, "forged") == 401
        wrong: list[Any] = ["high", None, [], {}, {"part": "x"}, {"part": [1.0]}]
        assert [await reward(given) for given in wrong] == [422] * 6
        assert not session.graded.is_set()
        assert [await reward({"part": 1.0}) for _ in range(2)] == [200, 200], (
            "a call sent again is the same call"
        )
        assert await reward(0.5) == 409
        assert (await post(server, session, "chat/completions", body)).status_code == 410
        server.service.close_session(session)
        assert await reward({"part": 1.0}) == 410


CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD: dict[str, tuple[str, Any, str]] = {
    "log-probabilities": ("chat/completions", CHAT | {"logprobs": True}, "logprobs"),
    "one call at most": (
        "chat/completions",
        CHAT | {"parallel_tool_calls": False},
        "parallel_tool_calls",
    ),
    "one call at most of Anthropic's": (
        "messages",
        CHAT | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice",
    ),
    "a given tool": (
        "chat/completions",
        CHAT | {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
    ),
    "functions": ("chat/completions", CHAT | {"functions": [{"name": "add"}]}, "functions"),
    "a format": (
        "chat/completions",
        CHAT | {"response_format": {"type": "json_object"}},
        "response_format",
    ),
    "a format of an answer": (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        "text.format",
    ),
    "the background": ("responses", {"input": "x", "background": True}, "background"),
    "a conversation": ("responses", {"input": "x", "conversation": "c1"}, "conversation"),
    "a tool of Anthropic's servers": (
        "messages",
        CHAT | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0]",
    ),
    "no mapping": ("chat/completions", [1], "body"),
    "several answers": (
        "chat/completions",
        {"n": 4, "messages": [{"role": "user", "content": "x"}]},
        "n",
    ),
    "no messages": ("chat/completions", {}, "messages"),
    "no messages of Anthropic's": ("messages", {"messages": []}, "messages"),
    "an image": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    "stored answers": (
        "responses",
        {"input": "x", "previous_response_id": "resp_1"},
        "previous_response_id",
    ),
    "an item": ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type"),
    "a tool": (
        "responses",
        {"input": "x", "tools": [{"type": "web_search"}]},
        "tools[0]",
    ),
    "tools": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}},
        "tools",
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_calls_name_the_field(kind: str) -> None:
    path, body, field = BAD[kind]
    async with opened() as (server, session):
        answer = await post(server, session, path, body)
        assert answer.status_code == 422
        assert answer.json()["error"]["field"] == field


async def test_with_a_token_of_the_run_programs_need_only_their_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_TOKEN", "the-token-of-this-run")
    async with opened() as (server, session):
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await post(server, session, "chat/completions", body)).status_code == 200
        keyed = {"authorization": f"Bearer {session.id}"}
        for method, path in (
            ("POST", "/episodes"),
            ("GET", "/stats"),
            ("GET", "/sessions"),
            ("DELETE", "/episodes/r1"),
        ):
            answer = await server.http.request(method, path, headers=keyed, json={})
            assert answer.status_code == 401, "a session's key opens nothing else"


async def test_the_message_of_an_error_says_what_to_do() -> None:
    async with opened() as (server, session):
        answer = await post(server, session, "chat/completions", CHAT | {"n": 2})
        assert answer.status_code == 422
        message = answer.json()["error"]["message"]
        assert message.endswith("field: n · value: 2 · remedy: make one call for each answer")


async def test_a_tool_choice_of_none_leaves_the_tools_out() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    async with opened() as (server, session):
        for choice, offered in (("none", False), ("auto", True), ({"type": "none"}, False)):
            body = CHAT | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": True}
            assert (await post(server, session, "chat/completions", body)).status_code == 200
            prompt = server.engine.tokenizer.decode(server.engine.asked[-1]["input_ids"])
            assert ("Adds." in prompt) == offered


async def test_the_models_of_a_session() -> None:
    async with opened() as (server, session):
        url = f"/sessions/{session.id}/v1/models"
        answer = await server.http.get(url, headers={"x-api-key": session.id})
        assert [model["id"] for model in answer.json()["data"]] == ["policy"]
        for name in ("policy", "Qwen/Qwen3-8B"):
            model = await server.http.get(f"{url}/{name}", headers={"x-api-key": session.id})
            assert model.json()["id"] == name
            assert (await server.http.get(f"{url}/{name}")).status_code == 401
        assert (await server.http.get(url)).status_code == 401


def rows_of_fields() -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yields the field, value and effect by API of each row of the table in docs/how-to/agents.md."""
    text = (ROOT / "docs" / "how-to" / "agents.md").read_text(encoding="utf-8")
    table = text.partition("## Fields of a call")[2].partition("## Calls")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            names, value, *effects = [cell.strip() for cell in line.strip("|").split("|")]
            for name in names.split(","):
                effect_of_api = dict(zip(WHOLE, effects, strict=True))
                yield name.strip(" `"), json.loads(value.strip("`")), effect_of_api


async def test_every_field_does_what_the_table_says() -> None:
    rows = list(rows_of_fields())
    assert len(rows) > 40
    async with opened() as (server, _):
        session = server.service.open_session(request_for(NAME, turns=10**6, sampled_tokens=10**9))
        for name, value, effects in rows:
            for path, effect in effects.items():
                # Fewer fields: a row may say the opposite of the whole body.
                bare = {"input": "x"} if path == "responses" else CHAT
                answer = await post(server, session, path, bare | {name: value})
                refused = effect in {"refused", "–"}
                assert answer.status_code == (422 if refused else 200), (name, path, answer.text)
                if refused:
                    error = answer.json()["error"]
                    assert error["remedy"] in error["message"]
                    assert name in error["message"]
        asked = server.engine.asked[-1]["sampling_params"]
        assert asked["temperature"] == 1.0


async def test_a_field_that_nobody_knows_is_refused() -> None:
    async with opened() as (server, session):
        answer = await post(server, session, "chat/completions", CHAT | {"guided_json": {}})
        assert answer.status_code == 422
        assert "guided_json" in answer.json()["error"]["message"]
        assert (await post(server, session, "chat/completions", CHAT | {"seed": None})).is_success


WRONG_STOPS: list[tuple[str, Any]] = [
    ("stop", ["a"] * 5),
    ("stop", ""),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", "x" * 1001),
    ("max_tokens", 0),
    ("max_completion_tokens", True),
    ("max_tokens", "9"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_STOPS)
async def test_an_end_that_cannot_be_is_refused(name: str, value: Any) -> None:
    async with opened() as (server, session):
        answer = await post(server, session, "chat/completions", CHAT | {name: value})
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, name)


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_stop_text_ends_the_answer_and_the_conversation_goes_on(path: str) -> None:
    name = "stop" if path == "chat/completions" else "stop_sequences"
    chat: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]

    def reply(text: str) -> str:
        return "so 3" if "Result" in text else "Act: add(1, 2)\nObservation: 9\nObservation: 8"

    async with served(Calculator, reply) as server:
        session = server.service.open_session(request_for(NAME))
        body = {"messages": chat, name: ["Observation:", "Final"]}
        first = (await post(server, session, path, body)).json()
        if path == "messages":
            (block,) = first["content"]
            said = block["text"]
            assert (first["stop_reason"], first["stop_sequence"]) == (
                "stop_sequence",
                "Observation:",
            )
        else:
            said = first["choices"][0]["message"]["content"]
            assert first["choices"][0]["finish_reason"] == "stop"
        assert said == "Act: add(1, 2)\n"
        chat += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Result: 3"},
        ]
        assert (await post(server, session, path, body)).status_code == 200

        session.close()
        (sequence,) = session.sequences()
        tokenizer = server.engine.tokenizer
        sampled = sequence.token_ids[sequence.mask == 1].tolist()
        whole = letters(tokenizer, "Act: add(1, 2)\nObservation:", end=False)
        assert sampled == whole + letters(tokenizer, "so 3"), "with the stop text"
        between = sequence.token_ids[len(whole) :][sequence.mask[len(whole) :] == 0].tolist()
        assert between[0] == tokenizer.eos_token_id, "the template ends the answer that was stopped"


async def test_a_program_may_ask_for_a_shorter_answer_but_not_for_a_longer_one() -> None:
    async with opened() as (server, session):
        for asked, sampled in ((2, 2), (10**6, 300)):
            body = CHAT | {"max_tokens": asked}
            answer = (await post(server, session, "chat/completions", body)).json()
            assert server.engine.asked[-1]["sampling_params"]["max_new_tokens"] == sampled
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_counted_tokens_are_those_that_are_sent() -> None:
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    async with opened() as (server, session):
        chat: list[dict[str, Any]] = [{"role": "user", "content": "1+2?"}]
        body = {"messages": chat, "tools": tools}
        for _ in range(2):
            counted = (await post(server, session, "messages/count_tokens", body)).json()
            answer = (await post(server, session, "messages", body)).json()
            sent = len(server.engine.asked[-1]["input_ids"])
            assert counted == {"input_tokens": sent}
            assert answer["usage"]["input_tokens"] == sent
            chat += [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": "again"},
            ]
        forged = await post(server, session, "messages/count_tokens", body, key="forged")
        assert forged.status_code == 401
        session.close()
        assert len(session.sequences()) == 1, "counting records nothing"


async def test_a_count_beyond_the_context_is_refused_and_ends_nothing() -> None:
    async with opened() as (server, _):
        session = server.service.open_session(request_for(NAME, context=10))
        body = {"messages": [{"role": "user", "content": "x" * 1000}]}
        answer = await post(server, session, "messages/count_tokens", body)
        assert (answer.status_code, session.stop_reason) == (400, "")


async def test_thoughts_are_signed_as_anthropics_library_expects() -> None:
    async with opened() as (server, session):
        body = CHAT | {"tools": [{"name": "add", "input_schema": SCHEMA}]}
        first = (await post(server, session, "messages", body)).json()["content"][0]
        assert first["type"] == "thinking"
        assert first["signature"]
        stream = (await post(server, session, "messages", body | {"stream": True})).text
        deltas = [event.get("delta", {}).get("type") for event in events(stream)]
        assert deltas.count("signature_delta") == 1


SURROGATE = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800", "b": 2}}\n</tool_call>'


async def test_half_a_pair_of_surrogates_in_a_tool_call_can_be_sent() -> None:
    async with served(NAME, lambda _: SURROGATE) as server:
        session = server.service.open_session(request_for(NAME))
        body = CHAT | {"tools": [{"name": "add", "input_schema": SCHEMA}], "max_tokens": 300}
        answer = (await post(server, session, "messages", body)).json()
        assert answer["content"][-1]["input"] == {"a": "?", "b": 2}


SAMPLED = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "[1, NaN]",
    '{"deep": [-Infinity]}',
    '"\\ud83d"',
    "1e308",
    "-1e-400",
    "1.0",
    "1e2",
    "12345678901234567890",
    "9007199254740993",
    "-170141183460469231731687303715884105728",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "0.1",
    '"NaN"',
    "null",
]
"""Arguments as a model may write them in JSON."""


def strictly(text: str | bytes) -> Any:
    """Reads JSON as other languages do, whose numbers are all floats."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    def number(written: str) -> float | int:
        value = float(written)
        assert abs(value) < float("inf"), f"{written} is beyond a float"
        return int(value) if value.is_integer() and abs(value) < 1e21 else value

    return json.loads(text, parse_constant=refuse, parse_float=number, parse_int=number)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_any_sampled_argument_is_sent_as_json_and_known_again(
    path: str, streams: bool
) -> None:
    said = ""
    functions = {
        "chat/completions": {"type": "function", "function": FUNCTION},
        "responses": {"type": "function", **FUNCTION},
        "messages": {"name": "add", "input_schema": SCHEMA},
    }
    body = {"model": "m", "tools": [functions[path]], "stream": streams}
    if path == "messages":
        body["max_tokens"] = 6000
    list_name = "input" if path == "responses" else "messages"
    async with served(NAME, lambda _: said) as server:
        request = request_for(NAME)
        request.sampling.max_new_tokens = 6000
        for argument in SAMPLED:
            said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {argument}}}}}\n</tool_call>'
            session = server.service.open_session(request)
            chat: list[Any] = [{"role": "user", "content": "1+2?"}]
            for _ in range(3):
                answer = await post(server, session, path, body | {list_name: chat})
                assert answer.status_code == 200
                chat = [*chat, *again(path, answer.text, streams)]
            session.close()
            assert len(session.sequences()) == 1, argument


def again(path: str, text: str, streams: bool) -> list[Any]:
    """Returns an answer as a client sends it back, and results of its calls."""
    whole: list[Any]
    if streams:
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        whole = streamed(path, [strictly(line) for line in lines if line.startswith("{")])
    else:
        body = strictly(text)
        if path == "chat/completions":
            whole = [body["choices"][0]["message"]]
        elif path == "responses":
            whole = body["output"]
        else:
            whole = [{"role": "assistant", "content": body["content"]}]
    results: list[Any] = []
    for item in whole:
        for call in item.get("tool_calls") or []:
            arguments = strictly(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments)
            results.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        if item.get("type") == "function_call":
            item["arguments"] = json.dumps(strictly(item["arguments"]))
            results.append(
                {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
            )
        for block in item["content"] if path == "messages" else []:
            if block["type"] == "tool_use":
                result = {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
                results.append({"role": "user", "content": [result]})
    return [*whole, *(results or [{"role": "user", "content": "go on"}])]


def streamed(path: str, found: list[Any]) -> list[Any]:
    """Returns the answer that a client puts together from events."""
    if path == "chat/completions":
        message = found[0]["choices"][0]["delta"]
        for call in message.get("tool_calls") or []:
            del call["index"]
        return [message]
    if path == "responses":
        output: list[Any] = found[-1]["response"]["output"]
        return output
    blocks = [each["content_block"] for each in found if each["type"] == "content_block_start"]
    for event in found:
        if event["type"] == "content_block_delta":
            block = blocks[event["index"]]
            if block["type"] == "tool_use":
                block["input"] = strictly(event["delta"]["partial_json"])
            else:
                block[block["type"]] = event["delta"][block["type"]]
    return [{"role": "assistant", "content": blocks}]


async def test_an_answer_may_be_nested_more_deeply_than_a_call() -> None:
    deep: Any = 2
    for _ in range(300):
        deep = [deep]
    call = {"name": "add", "arguments": {"a": deep, "b": 2}}
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    async with served(NAME, lambda _: said) as server:
        request = request_for(NAME)
        request.sampling.max_new_tokens = 3000
        session = server.service.open_session(request)
        body = CHAT | {"tools": [{"name": "add", "input_schema": SCHEMA}]}
        answer = await post(server, session, "messages", body)
        (block,) = answer.json()["content"]
        assert block["input"]["a"] == deep


async def test_engine_failure_is_an_error_that_clients_retry() -> None:
    async with opened() as (server, session):
        server.engine.failures = 1
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await post(server, session, "chat/completions", body)).status_code == 500
        assert session.requests.fault(is_graded=False)
        assert (await post(server, session, "chat/completions", body)).status_code == 200
        assert not session.requests.fault(is_graded=False)


USER = {"role": "user", "content": [{"type": "text", "text": "1+2?"}]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
WHOLE: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "stream": False,
        "messages": [
            {"role": "system", "content": "Calculate."},
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "add",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "n": 1,
        "stop": ["never"],
        "max_tokens": 5000,
    },
    "responses": {
        "instructions": "Calculate.",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "1+2?"}],
            },
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "add"}],
            },
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": True}],
    },
    "messages": {
        "system": [{"type": "text", "text": "Calculate."}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "add", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}],
            },
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    },
}
ODD: tuple[Any, ...] = (
    None,
    0,
    1.5,
    True,
    "",
    "\u0000é",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"role": {}},
    {"type": "text"},
    ["a"],
    10**30,
)


def mutations(value: Any) -> Iterator[Any]:
    """Yields copies of `value` in which one part is replaced by an odd value or left out."""
    yield from ODD
    if isinstance(value, dict):
        for name, item in value.items():
            yield {key: each for key, each in value.items() if key != name}
            yield from (value | {name: changed} for changed in mutations(item))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield value[:i] + value[i + 1 :]
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in mutations(item))


@pytest.mark.parametrize("path", WHOLE)
async def test_odd_body_never_crashes_the_gateway(path: str) -> None:
    async with opened() as (server, _):
        session = server.service.open_session(request_for(NAME, turns=10**6, sampled_tokens=10**9))
        assert (await post(server, session, path, WHOLE[path])).status_code == 200
        statuses = set()
        for body in mutations(WHOLE[path]):
            answer = await post(server, session, path, body)
            assert answer.status_code in (200, 400, 422), (body, answer.text)
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        assert statuses >= {200, 422}
