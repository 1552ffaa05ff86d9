"""The sequences and masks that sessions record, checked by hand: no answer is ever tokenised
again."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from common.clients.rollout import GenerationFailed
from common.errors import ConfigError, InvalidInput
from common.wire.schemas import Completion, EpisodeLimits, EpisodeSequence
from services.environment.messages import parse_messages
from services.environment.session import (
    CallAnswer,
    LimitReached,
    Session,
    SessionClosed,
)
from services.environment.template import Template
from services.environment.tree import SessionTree
from tests.support.errors import raises
from tests.support.models.trap_models import (
    CHATML,
    STRIPS,
    ScriptedEngine,
    letters,
    trap_session,
    trap_tokenizer,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
HEAD = f"<|im_start|>system\nTools:\n{json.dumps(TOOLS[0])}<|im_end|>\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(
    session: Session,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    key: str = "",
) -> CallAnswer:
    messages = parse_messages(chat)
    return await session.call(messages, tools or [], key or json.dumps([chat, tools]))


def sent_back(answer: CallAnswer, **changes: Any) -> dict[str, Any]:
    """Returns the answer as a program sends it back in its next call: arguments as text, without
    thoughts."""
    message = {
        name: value for name, value in answer.message.fields.items() if name != "reasoning_content"
    }
    if "tool_calls" in message:
        message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return message | changes


def _with_text_arguments(tool_call: dict[str, Any]) -> dict[str, Any]:
    function = tool_call["function"]
    arguments = json.dumps(function["arguments"])
    return tool_call | {"function": {"name": function["name"], "arguments": arguments}}


def is_sequence(
    found: EpisodeSequence, prompt: list[int], parts: list[tuple[list[int], int]]
) -> None:
    """Asserts that a sequence consists of exactly these tokens: a prompt, followed by (tokens,
    mask) pairs."""
    assert found.prompt_ids.tolist() == prompt
    assert found.token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert found.mask.tolist() == [mask for ids, mask in parts for _ in ids]
    assert (found.logprobs[found.mask == 0] == 0).all()
    assert (found.logprobs[found.mask == 1] < 0).all()
    spans = [(turn.start, turn.end) for turn in found.turns]
    ends = np.cumsum([len(ids) for ids, _ in parts]).tolist()
    starts = [0, *ends[:-1]]
    assert spans == [
        span for span, (_, mask) in zip(zip(starts, ends, strict=True), parts, strict=True) if mask
    ]
    assert found.weight_versions[0][1] == 0
    assert found.weight_versions[-1][2] == len(found.token_ids)


async def test_second_turn_keeps_sampled_tokens_though_their_text_tokenises_differently() -> None:
    session, engine, tokenizer = trap_session(["abab", "ok"])
    first = await ask(session, [user("ab")])
    assert first.message.content == "abab"
    assert letters(tokenizer, "abab") != tokenizer("abab<|im_end|>").input_ids, "the trap is none"
    await ask(session, [user("ab"), sent_back(first), user("more")])
    prompt = tokenizer("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n").input_ids
    between = tokenizer("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n").input_ids
    (found,) = session.sequences()
    is_sequence(
        found,
        prompt,
        [(letters(tokenizer, "abab"), 1), (between, 0), (letters(tokenizer, "ok"), 1)],
    )
    assert engine.asked[1] == [*prompt, *letters(tokenizer, "abab"), *between], (
        "the engine continues what is trained"
    )


async def test_the_separator_after_a_stop_token_is_kept_and_a_cut_answer_is_ended() -> None:
    tokenizer = trap_tokenizer()
    cut = letters(tokenizer, "aba", end=False)
    session, _, _ = trap_session([cut, "ok"])
    first = await ask(session, [user("x")])
    assert first.finish_reason == "length"
    await ask(session, [user("x"), sent_back(first), user("y")])
    (found,) = session.sequences()
    between = tokenizer(
        "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    ).input_ids
    prompt = tokenizer("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").input_ids
    is_sequence(found, prompt, [(cut, 1), (between, 0), (letters(tokenizer, "ok"), 1)])


async def test_thoughts_that_the_template_strips_stay_in_the_sequence() -> None:
    thought = "<think>\nabab\n</think>\n\nok"
    session, _, tokenizer = trap_session([thought, "done"], STRIPS)
    first = await ask(session, [user("x")])
    assert (first.message.content, first.message.reasoning) == ("ok", "abab")
    await ask(session, [user("x"), sent_back(first), user("y")])
    (found,) = session.sequences()
    prompt = tokenizer("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").input_ids
    between = tokenizer("\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n").input_ids
    is_sequence(
        found,
        prompt,
        [(letters(tokenizer, thought), 1), (between, 0), (letters(tokenizer, "done"), 1)],
    )


@pytest.mark.parametrize(
    "arguments",
    [
        '{"b": 2.0, "a": 1}',
        '{"b":2,"a":1}',
        ' {"a" : 1.0, "b" : 2}',
        '{"\\u0061": 1, "b": 2e0}',
        {"b": 2, "a": 1},
    ],
)
async def test_tool_arguments_are_compared_as_json(arguments: Any) -> None:
    session, _, tokenizer = trap_session([CALL, "3"])
    chat = [user("1+2")]
    first = await ask(session, chat, TOOLS)
    assert first.message.tool_calls[0]["function"] == {
        "name": "add",
        "arguments": {"a": 1, "b": 2.0},
    }
    call = {"id": "own", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "content": "3", "tool_call_id": "own"}
    await ask(
        session,
        [*chat, {"role": "assistant", "content": None, "tool_calls": [call]}, result],
        TOOLS,
    )
    (found,) = session.sequences()
    prompt = tokenizer(f"{HEAD}<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n").input_ids
    response = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    is_sequence(
        found,
        prompt,
        [
            (letters(tokenizer, CALL), 1),
            (tokenizer(response).input_ids, 0),
            (letters(tokenizer, "3"), 1),
        ],
    )


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1, "b": 3}', '{"a": 1}', '{"a": "1", "b": 2}', '{"a": true, "b": 2}', "{broken"],
)
async def test_other_arguments_are_a_rewritten_history(arguments: str) -> None:
    session, engine, tokenizer = trap_session([CALL, "3"])
    await ask(session, [user("1+2")], TOOLS)
    call = {"id": "own", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "content": "3", "tool_call_id": "own"}
    await ask(
        session,
        [user("1+2"), {"role": "assistant", "content": "", "tool_calls": [call]}, result],
        TOOLS,
    )
    first, second = session.sequences()
    assert first.token_ids.tolist() == letters(tokenizer, CALL)
    assert second.prompt_ids.tolist() == engine.asked[1], "it is rendered as a whole"
    assert second.token_ids.tolist() == letters(tokenizer, "3")


async def test_a_retry_gets_the_same_answer_and_is_recorded_once() -> None:
    session, engine, _ = trap_session(["abab", "never"])
    first, again = await asyncio.gather(ask(session, [user("x")]), ask(session, [user("x")]))
    assert first is again
    messages = parse_messages([user("x")])
    key = json.dumps([[user("x")], None])
    assert await session.call(messages, [], key, is_retry=True) is first
    assert len(engine.asked) == len(session.sequences()) == 1


async def test_an_identical_call_that_is_no_retry_is_sampled_anew() -> None:
    session, engine, _ = trap_session([GenerationFailed("gone"), "ab", "ba"])
    messages = parse_messages([user("x")])
    calls = [session.call(messages, [], "key", is_retry=False) for _ in range(2)]
    failed, first = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(failed, GenerationFailed)
    assert isinstance(first, CallAnswer)
    second = await session.call(messages, [], "key", is_retry=True)
    assert (first.message.content, second.message.content) == ("ab", "ba")
    third = await asyncio.gather(session.call(messages, [], "key"), return_exceptions=True)
    assert isinstance(third[0], IndexError), "the script is at its end: it was sampled anew"
    assert len(set(engine.seeds)) == 3


async def test_a_call_that_failed_is_sampled_again() -> None:
    session, engine, _ = trap_session([GenerationFailed("gone"), "ok"])
    with pytest.raises(GenerationFailed):
        await ask(session, [user("x")])
    assert (await ask(session, [user("x")])).message.content == "ok"
    assert (len(engine.asked), session.turns) == (2, 1)


async def test_a_call_that_failed_takes_none_of_the_episodes_tokens() -> None:
    limits = EpisodeLimits(sampled_tokens=5)
    session, _, _ = trap_session([GenerationFailed("gone"), "abab"], limits=limits)
    with pytest.raises(GenerationFailed):
        await ask(session, [user("x")])

    answer = await ask(session, [user("x")])

    assert (answer.message.content, answer.finish_reason, answer.sampled_tokens) == (
        "abab",
        "stop",
        5,
    )


async def test_a_client_that_went_away_gets_its_answer_later() -> None:
    release = asyncio.Event()

    class Slow(ScriptedEngine):
        async def __call__(self, *arguments: Any) -> Completion:
            await release.wait()
            return await super().__call__(*arguments)

    session, _, tokenizer = trap_session([])
    session._sample = Slow([letters(tokenizer, "ok")], tokenizer.eos_token_id)
    call = asyncio.create_task(ask(session, [user("x")]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    release.set()
    assert (await ask(session, [user("x")])).message.content == "ok"
    assert len(session.sequences()) == 1


async def test_a_retry_is_for_the_call_that_nobody_waits_for() -> None:
    release = asyncio.Event()

    class Slow(ScriptedEngine):
        async def __call__(self, *arguments: Any) -> Completion:
            await release.wait()
            return await super().__call__(*arguments)

    session, _, tokenizer = trap_session([])
    texts = [letters(tokenizer, text) for text in ("ab", "ba")]
    session._sample = Slow(texts, tokenizer.eos_token_id)
    messages = parse_messages([user("x")])
    stays, leaves = (
        asyncio.create_task(session.call(messages, [], "key", is_retry=False)) for _ in range(2)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)

    again = asyncio.create_task(session.call(messages, [], "key", is_retry=True))
    await asyncio.sleep(0)
    release.set()
    answers = await asyncio.gather(stays, again)

    assert [answer.message.content for answer in answers] == ["ab", "ba"]


async def test_a_compacted_history_opens_a_new_sequence() -> None:
    session, _, tokenizer = trap_session(["abab", "aba", "ok"])
    first = await ask(session, [user("long"), user("story")])
    await ask(session, [user("long"), user("story"), sent_back(first), user("go on")])
    await ask(session, [user("in short: abab"), user("go on")])
    one, other = session.sequences()
    assert one.mask.sum() == len(letters(tokenizer, "abab")) + len(letters(tokenizer, "aba"))
    text = (
        "<|im_start|>user\nin short: abab<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    is_sequence(other, tokenizer(text).input_ids, [(letters(tokenizer, "ok"), 1)])


async def test_an_answer_rewritten_in_the_middle_opens_a_new_sequence_never_a_splice() -> None:
    session, engine, tokenizer = trap_session(["abab", "aba", "ok"])
    first = await ask(session, [user("x")])
    second = await ask(session, [user("x"), sent_back(first), user("y")])
    await ask(
        session,
        [user("x"), sent_back(first), user("y"), sent_back(second, content="other"), user("z")],
    )
    assert len(session.sequences()) == 2
    text = tokenizer.decode(engine.asked[2])
    assert engine.asked[2] == tokenizer(text).input_ids, "nothing sampled is in it"


async def test_forks_share_their_beginning_and_train_it_once() -> None:
    session, _, tokenizer = trap_session(["abab", "aba", "baba"])
    first = await ask(session, [user("x")])
    await asyncio.gather(
        *(ask(session, [user("x"), sent_back(first), user(text)]) for text in ("y", "z"))
    )
    one, other = session.sequences()
    prompt = tokenizer("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").input_ids
    betweens = [
        tokenizer(f"\n<|im_start|>user\n{x}<|im_end|>\n<|im_start|>assistant\n").input_ids
        for x in "yz"
    ]
    shared = letters(tokenizer, "abab")
    is_sequence(one, prompt, [(shared, 1), (betweens[0], 0), (letters(tokenizer, "aba"), 1)])
    is_sequence(other, [*prompt, *shared, *betweens[1]], [(letters(tokenizer, "baba"), 1)])
    assert one.mask.sum() + other.mask.sum() == session.sampled_tokens, (
        "every sampled token is trained once"
    )


async def test_parallel_calls_with_equal_answers_are_told_apart_by_their_ids() -> None:
    session, _, tokenizer = trap_session([CALL, CALL, "3"])
    one, other = await asyncio.gather(
        *(ask(session, [user("1+2")], TOOLS, key) for key in ("a", "b"))
    )
    assert one.message.tool_calls[0]["id"] != other.message.tool_calls[0]["id"]
    result = {"role": "tool", "content": "3", "tool_call_id": other.message.tool_calls[0]["id"]}
    await ask(session, [user("1+2"), sent_back(other), result], TOOLS)
    first, second = session.sequences()
    assert first.token_ids.tolist() == letters(tokenizer, CALL)
    assert second.turns[-1].end == len(second.token_ids)
    assert (len(first.turns), len(second.turns)) == (1, 2)


async def test_several_results_of_tools_are_one_continuation() -> None:
    both = CALL + "\n" + CALL.replace("1", "7")
    session, _, tokenizer = trap_session([both, "ok"])
    first = await ask(session, [user("x")], TOOLS)
    results = [
        {"role": "tool", "content": str(i), "tool_call_id": call["id"]}
        for i, call in enumerate(first.message.tool_calls)
    ]
    await ask(session, [user("x"), sent_back(first), *results], TOOLS)
    (found,) = session.sequences()
    text = "".join(f"\n<tool_response>\n{i}\n</tool_response>" for i in range(2))
    between = tokenizer(f"\n<|im_start|>user{text}<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert found.token_ids.tolist() == [
        *letters(tokenizer, both),
        *between,
        *letters(tokenizer, "ok"),
    ]


async def test_other_tools_are_another_sequence() -> None:
    session, _, _ = trap_session(["ok", "ok"])
    first = await ask(session, [user("x")], TOOLS)
    await ask(session, [user("x"), sent_back(first), user("y")])
    assert len(session.sequences()) == 2


async def test_tool_call_that_is_not_json_stays_in_the_text() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call>'
    session, _, _ = trap_session([text, "ok"])
    first = await ask(session, [user("x")], TOOLS)
    assert "not JSON" in first.problem
    assert (first.message.content, first.message.tool_calls) == (text, [])
    await ask(session, [user("x"), sent_back(first), user("again")], TOOLS)
    assert len(session.sequences()) == 1


async def test_weight_versions_change_under_a_running_session() -> None:
    session, engine, _ = trap_session(["aba", "ok"])
    first = await ask(session, [user("x")])
    engine.version = 4
    await ask(session, [user("x"), sent_back(first), user("y")])
    (found,) = session.sequences()
    turn = found.turns[1]
    assert found.weight_versions == [(0, 0, turn.start), (4, turn.start, turn.end)]


@pytest.mark.parametrize(
    ("limits", "script", "reason"),
    [
        (EpisodeLimits(turns=1), ["ok", "ok"], "turns"),
        (EpisodeLimits(sampled_tokens=3), ["ok", "ok"], "sampled_tokens"),
        (EpisodeLimits(context=100), ["ok", "ok"], "context"),
    ],
)
async def test_a_limit_ends_the_session_with_its_name(
    limits: EpisodeLimits, script: list[str], reason: str
) -> None:
    session, engine, _ = trap_session(script, limits=limits)
    first = await ask(session, [user("x")])
    with pytest.raises(LimitReached) as caught:
        await ask(session, [user("x"), sent_back(first), user("y" * 60)])
    assert caught.value.field == session.stop_reason == reason
    assert len(engine.asked) == 1
    (found,) = session.sequences()
    assert found.finish_reason == "length"
    assert found.mask.sum() == 3


async def test_an_answer_is_cut_where_the_context_ends() -> None:
    session, _, tokenizer = trap_session(["a" * 300])
    prompt = tokenizer("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").input_ids
    session, _, _ = trap_session(["a" * 300], limits=EpisodeLimits(context=len(prompt) + 10))
    assert (await ask(session, [user("x")])).sampled_tokens == 10
    assert session.stop_reason == "context"


async def test_huge_observation_ends_the_context_and_is_not_tokenised() -> None:
    session, engine, _ = trap_session(["ok", "ok"], limits=EpisodeLimits(context=1000))
    first = await ask(session, [user("x")])
    for size in (900_000, 10_000_000):
        with raises(LimitReached, limit="context"):
            await ask(session, [user("x"), sent_back(first), user("y" * size)])
    assert session.stop_reason == "context"
    assert len(engine.asked) == 1


async def test_closed_session_answers_nothing_and_cancels_running_calls() -> None:
    waits = asyncio.Event()

    class Stuck(ScriptedEngine):
        async def __call__(self, *arguments: Any) -> Completion:
            await waits.wait()
            raise AssertionError("it was cancelled")

    session, _, tokenizer = trap_session(["ok"])
    await ask(session, [user("x")])
    session._sample = Stuck([], tokenizer.eos_token_id)
    call = asyncio.create_task(ask(session, [user("y")]))
    await asyncio.sleep(0.01)
    session.close()
    with pytest.raises(SessionClosed):
        await call
    with pytest.raises(SessionClosed):
        await ask(session, [user("x")])
    assert len(session.sequences()) == 1


async def test_seeds_depend_on_the_call_not_on_the_order() -> None:
    seeds = []
    for order in ("yz", "zy"):
        session, engine, _ = trap_session(["ok", "ok"])
        for text in order:
            await ask(session, [user(text)])
        seeds.append(dict(zip(order, engine.seeds, strict=True)))
    assert seeds[0] == seeds[1]
    assert seeds[0]["y"] != seeds[0]["z"]


BAD: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0]",
    ),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "messages[1].tool_calls[0]",
    ),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "prefill"}],
        "messages[1].role",
    ),
    ([{"role": "tool", "content": "x", "tool_call_id": 7}], "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("chat", "field"), BAD, ids=[field for _, field in BAD])
async def test_bad_messages_are_named(chat: Any, field: str) -> None:
    session, engine, _ = trap_session(["ok"])
    with pytest.raises(InvalidInput) as caught:
        await ask(session, chat)
    assert caught.value.field == field
    assert engine.asked == []


TEMPLATES = {
    "the model has none": None,
    "stop": CHATML.replace("<|im_end|>", "<|done|>"),
    "depends on the messages before it": CHATML.replace(
        "{% if add_gen", "{{ messages | length }}{% if add_gen"
    ),
    "starts an answer": CHATML.rpartition("{% if add_generation_prompt %}")[0],
    "not the new messages": CHATML.replace("else message.content", "else message.content | upper"),
}


@pytest.mark.parametrize(("reason", "template"), TEMPLATES.items(), ids=TEMPLATES)
def test_a_template_that_cannot_continue_is_refused_with_the_reason(
    reason: str, template: str | None
) -> None:
    tokenizer = trap_tokenizer(template or CHATML)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=reason):
        Template(tokenizer, [tokenizer.eos_token_id])


async def test_a_template_without_tools_refuses_calls_with_tools() -> None:
    plain = (
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}"
    )
    asks = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    session, _, _ = trap_session(["ok", "ok"], plain + asks)
    with raises(InvalidInput, field="tools"):
        await ask(session, [user("x")], TOOLS)
    first = await ask(session, [user("x")])
    await ask(session, [user("x"), sent_back(first), user("y")])
    assert len(session.sequences()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "ba\r\nok"},
        {"content": "  ba\nok\n"},
        {"content": "<think>\nab\n</think>\n\nba\nok"},
        {"name": "agent"},
        {"reasoning_content": "a summary"},
    ],
    ids=str,
)
async def test_what_client_libraries_change_in_an_answer_is_no_rewrite(
    changes: dict[str, Any],
) -> None:
    session, engine, tokenizer = trap_session(["<think>ab</think>ba\nok ", "aba"], STRIPS)
    first = await ask(session, [user("x")])
    await ask(session, [user("x\n"), sent_back(first, **changes), user("y")])
    (sequence,) = session.sequences()
    recorded = [*engine.asked[0], *letters(tokenizer, "<think>ab</think>ba\nok ")]
    assert engine.asked[1][: len(recorded)] == recorded
    assert sequence.mask.sum() == len(letters(tokenizer, "<think>ab</think>ba\nok abaa"))


async def test_thoughts_tell_two_equal_answers_apart() -> None:
    answers = ["<think>ab</think>ok", "<think>ba</think>ok", "aba"]
    session, engine, tokenizer = trap_session(answers, STRIPS)
    await ask(session, [user("x")], key="one")
    second = await ask(session, [user("x")], key="two")
    back = sent_back(second, reasoning_content="ba")
    await ask(session, [user("x"), back, user("y")])
    recorded = [*engine.asked[1], *letters(tokenizer, answers[1])]
    assert engine.asked[2][: len(recorded)] == recorded


def test_a_conversation_may_have_thousands_of_turns() -> None:
    tree = SessionTree()
    chat = []
    node = None
    turns = 3000
    for turn in range(turns):
        new = parse_messages([user(f"{turn}"), {"role": "assistant", "content": "yes"}])
        sampled = Completion(
            token_ids=np.array([turn], np.int32),
            logprobs=np.array([-0.1], np.float32),
            finish_reason="stop",
            weight_versions=[(1, 0, 1)],
        )
        node = tree.add(node, new, [], added=[turn], sampled=sampled)
        chat += new
    question = parse_messages([user("and then?")])
    found, left = tree.find([*chat, *question], [])
    assert (found, left) == (node, question)
    assert found is not None
    assert len(found.tokens) == 2 * turns
    (sequence,) = tree.sequences()
    assert int(sequence.mask.sum()) == turns


def tool_call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
