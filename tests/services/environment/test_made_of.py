"""What an environment-server is made of: the template of a model's files, texts that end an answer,
the built-in tool, what an engine is asked for, limits of tokens."""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from common.clients.rollout import GenerationFailed
from common.errors import ConfigError
from common.settings.sections import ModelSection
from common.wire.schemas import Completion, EpisodeLimits, EpisodePolicy, Int32
from services.environment import python_tool
from services.environment import template as template_module
from services.environment.messages import parse_messages
from services.environment.outcome import EnvironmentLost
from services.environment.python_tool import PythonEnvironment
from services.environment.session import CallOptions, LimitReached, Session
from services.environment.template import Template, cut, load_template
from services.sandbox.cases import CaseResult
from services.sandbox.sandbox import Limits, SandboxFault
from tests.support.environments.environments import Calculator, request_for, served
from tests.support.models.trap_models import CHATML, STRIPS, letters, trap_tokenizer


@pytest.mark.parametrize("own", [CHATML, None])
@pytest.mark.parametrize("chosen", ["", "own", STRIPS])
@pytest.mark.parametrize("of_generation", [OSError(), None, 2, 0, [0, 2], [2], [0, 1]])
def test_a_model_is_used_with_its_own_files_or_the_chosen_template(
    monkeypatch: pytest.MonkeyPatch, own: str | None, chosen: str, of_generation: Any
) -> None:
    tokenizer = trap_tokenizer()
    tokenizer.chat_template = own
    asked: list[Any] = []

    def load(name: str, *, trust_remote_code: bool) -> Any:
        asked.append((name, trust_remote_code))
        return tokenizer

    def generation(name: str) -> Any:
        asked.append(name)
        if isinstance(of_generation, OSError):
            raise of_generation
        return SimpleNamespace(eos_token_id=of_generation)

    monkeypatch.setattr(template_module, "check_model", asked.append)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    monkeypatch.setattr(transformers.GenerationConfig, "from_pretrained", generation)
    config = ModelSection(name="a/model", chat_template=chosen, trust_remote_code=True)
    if own is None and chosen != STRIPS:
        with pytest.raises(ConfigError, match="the model has none"):
            load_template(config, {})
        return
    template, stops = load_template(config, {"enable_thinking": False})
    assert asked == ["a/model", ("a/model", True), "a/model"]
    assert tokenizer.chat_template == (STRIPS if chosen == STRIPS else own)
    more = of_generation if isinstance(of_generation, list) else [of_generation]
    found = {tokenizer.eos_token_id, *(each for each in more if isinstance(each, int))}
    assert stops == sorted(found)
    for stop in stops:
        assert template.decode([5, stop]) == tokenizer.decode([5])


def test_variables_of_the_settings_reach_the_template() -> None:
    tokenizer = trap_tokenizer(CHATML + "{{ mood or '' }}")
    template = Template(tokenizer, [tokenizer.eos_token_id], {"mood": "calm"})
    prompt = template.text(template.prompt(parse_messages([{"role": "user", "content": "1"}]), []))
    assert prompt.endswith("calm")


@pytest.mark.parametrize("error", [OSError("no file\nmore"), ValueError("")])
def test_a_tokenizer_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(template_module, "check_model", lambda _: None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    with pytest.raises(ConfigError) as refused:
        load_template(ModelSection(name="a/model"), {})
    assert (refused.value.field, refused.value.value) == ("model.name", "a/model")
    reason = "no file" if isinstance(error, OSError) else "ValueError"
    assert refused.value.message == f"the tokenizer cannot be loaded: {reason}"


def test_a_model_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(eos_token_id=None, chat_template=CHATML)
    generation = SimpleNamespace(eos_token_id=None)
    monkeypatch.setattr(template_module, "check_model", lambda _: None)
    for kind, found in (("AutoTokenizer", tokenizer), ("GenerationConfig", generation)):
        loads: Callable[..., Any] = lambda *_, found=found, **__: found  # noqa: E731
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", loads)
    with pytest.raises(ConfigError, match="no end-of-sequence token") as refused:
        load_template(ModelSection(name="a/model"), {})
    assert (refused.value.field, refused.value.value) == ("model.name", "a/model")


@given(st.text("ab.", max_size=8), st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3))
def test_a_text_is_cut_at_the_first_place_with_a_stop_text(text: str, stops: list[str]) -> None:
    before, stop, after = cut(text, stops)
    assert before + stop + after == text
    places = [place for place in range(len(text)) if text.startswith(tuple(stops), place)]
    if not stops or not places:
        assert (before, stop, after) == (text, "", "")
        return
    assert len(before) == places[0]
    assert stop in stops


RESULTS: list[tuple[Any, str | None]] = [
    (CaseResult("passed", 0.1, "3\n"), "3\n"),
    (CaseResult("passed", 0.1, ""), "(nothing was printed)"),
    (CaseResult("error", 0.1, "NameError: x"), "error: NameError: x"),
    (CaseResult("timeout", 5.0, ""), "timeout"),
    (CaseResult("starved", 5.0, "busy"), None),
    (SandboxFault("it was killed"), None),
]


@pytest.mark.parametrize(("result", "told"), RESULTS, ids=range(len(RESULTS)))
def test_the_model_is_told_what_its_program_printed_or_why_it_ended(
    monkeypatch: pytest.MonkeyPatch, result: Any, told: str | None
) -> None:
    asked: list[str] = []

    def run(code: str, cases: Sequence[Any]) -> list[CaseResult]:
        (case,) = cases
        assert case.request == {"kind": "stdin", "input": ""}
        asked.append(code)
        if isinstance(result, Exception):
            raise result
        return [result]

    monkeypatch.setattr(python_tool, "_sandbox", lambda: SimpleNamespace(run=run))
    environment = PythonEnvironment()
    environment.reset()
    if told is None:
        with pytest.raises(EnvironmentLost):
            environment.python("print(1)")
    else:
        assert environment.python("print(1)") == told
    assert asked == ["print(1)"]


def test_the_output_of_a_program_is_its_result_whatever_it_is() -> None:
    case = python_tool._OutputCase({"kind": "stdin", "input": ""})
    done = {"status": "done", "seconds": 2, "detail": "no", "output": "3"}
    assert case.verdict(done) == CaseResult("passed", 2.0, "3")
    assert case.verdict(done | {"status": "error"}) == CaseResult("error", 2.0, "no")


def test_the_tools_sandbox_is_made_once_with_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Limits, int]] = []
    monkeypatch.setattr(python_tool, "Sandbox", lambda *given: made.append(given))
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    python_tool._sandbox.__wrapped__()
    assert made == [(Limits(timeout_s=5.0, memory_mb=512, output_kb=16), 1)]


@pytest.mark.parametrize("adapter", ["", "run-7"])
@pytest.mark.parametrize("stop", [(), ("END", "STOP")])
async def test_an_engine_is_asked_with_the_settings_of_the_request(
    adapter: str, stop: tuple[str, ...]
) -> None:
    async with served(Calculator, lambda _: "3") as server:
        request = request_for(server.service.runner.name)
        request.sampling.temperature = 0.25
        request.sampling.max_new_tokens = 40
        request.task.seed = 5
        request.policy = EpisodePolicy(adapter=adapter, version=7 if adapter else 0)
        session = server.service.open_session(request, 1, 2)
        chat = parse_messages([{"role": "user", "content": "1+2?"}])
        # The engine says that its own weights have answered, which are no adapter.
        with pytest.raises(GenerationFailed) if adapter else nullcontext():
            await session.call(chat, [], "key", options=CallOptions(stop=stop))
        body = server.engine.asked[-1]
        sampling = body["sampling_params"]
        assert body.get("lora_path") == (adapter or None)
        assert (sampling["temperature"], sampling["max_new_tokens"]) == (0.25, 40)
        assert sampling["n"] == 1
        assert sampling["stop_token_ids"] == [server.engine.tokenizer.eos_token_id]
        assert sampling.get("stop", []) == list(stop)
        # With stop texts, the text that the engine sees has to be that of the session.
        assert sampling["skip_special_tokens"] == (not stop)
        assert len(body["input_ids"]) == session.count_tokens(chat, [])
        server.service.close_session(session)


class Engine:
    """Answers with as many tokens as a draw says; waits until it may go on."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.tokenizer = trap_tokenizer()
        self.asked: list[int] = []
        self.seeds: list[int] = []
        self.go_on = asyncio.Event()

    async def __call__(
        self, tokens: Int32, max_new_tokens: int, seed: int, stop: Sequence[str]
    ) -> Completion:
        self.asked.append(max_new_tokens)
        self.seeds.append(seed)
        await self.go_on.wait()
        text = "x" * self.draw.randint(0, 12)
        ids = letters(self.tokenizer, text)
        is_cut = len(ids) > max_new_tokens
        ids = ids[:max_new_tokens]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason="length" if is_cut else "stop",
            weight_versions=[(0, 0, len(ids))],
        )


@pytest.mark.parametrize("seed", range(30))
async def test_every_answer_gets_the_tokens_that_all_limits_leave(seed: int) -> None:
    """Answers that are sampled at once share what is left."""
    draw = random.Random(seed)
    engine = Engine(draw)
    engine.go_on.set()
    template = Template(engine.tokenizer, [engine.tokenizer.eos_token_id])
    limits = EpisodeLimits(
        turns=draw.choice([3, 99]),
        sampled_tokens=draw.choice([10, 30, 999]),
        context=draw.choice([45, 60, 999]),
    )
    most = draw.choice([8, 20])
    session = Session("s", template, engine, limits=limits, max_new_tokens=most, seed=seed)
    left = limits.sampled_tokens
    turns = 0
    for number in range(6):
        asked = draw.choice([None, 5, 50])
        messages = parse_messages([{"role": "user", "content": "y" * draw.randint(1, 25)}])
        prompt = len(template.prompt(messages, []))
        assert session.count_tokens(messages, []) == prompt
        rooms = {
            "length": min(most, asked or most),
            "sampled_tokens": left,
            "context": limits.context - prompt,
        }
        room = min(rooms.values())
        reason = next(name for name, value in rooms.items() if value == room)
        if turns == limits.turns or room <= 0:
            with pytest.raises(LimitReached) as reached:
                await session.call(messages, [], str(number), options=CallOptions((), asked))
            name = "turns" if turns == limits.turns else reason
            assert (reached.value.limit, session.stop_reason) == (name, name)
            assert (reached.value.field, reached.value.value) == (name, str(getattr(limits, name)))
            continue
        answer = await session.call(messages, [], str(number), options=CallOptions((), asked))
        turns += 1
        left -= answer.sampled_tokens
        assert engine.asked[-1] == room
        assert answer.prompt_tokens == prompt
        assert session.stop_reason == (reason if answer.finish_reason == "length" else "")
        assert (session.turns, session.sampled_tokens) == (turns, limits.sampled_tokens - left)
    assert len(set(engine.seeds)) == len(engine.seeds)
    assert all(0 <= each < 2**31 for each in engine.seeds)


async def test_answers_that_are_sampled_at_once_share_turns_and_tokens() -> None:
    engine = Engine(random.Random(0))
    template = Template(engine.tokenizer, [engine.tokenizer.eos_token_id])
    limits = EpisodeLimits(turns=3, sampled_tokens=25)
    session = Session("s", template, engine, limits=limits, max_new_tokens=10)
    calls = [
        asyncio.create_task(
            session.call(
                parse_messages([{"role": "user", "content": str(number)}]), [], str(number)
            )
        )
        for number in range(4)
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.asked == [10, 10, 5]
    engine.go_on.set()
    *_, last = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(last, LimitReached)
    assert last.limit == "turns"
    assert session.turns == 3
    assert 3 <= session.sampled_tokens <= 25
