"""The teacher's requests and answers, of both APIs, without a server: what is asked, which scores
come out, and how every answer that is unfit is named.
"""

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from common.errors import ConfigError, ServiceError
from common.settings.sections import TeacherSection
from common.wire.schemas import Float32
from tests.support.errors import raises
from trainer.rollouts.teacher import Teacher, TeacherFailed

PATIENCE_S = 30.0


class Tokenizer:
    """One token a character."""

    all_special_tokens = ("<end>", "<pad>")

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=[ord(each) for each in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Served:
    """A teacher behind one of the APIs, whose score of a token depends on its row and place."""

    def __init__(self, is_openai: bool) -> None:
        self.is_openai = is_openai
        self.asked: list[tuple[str, Any, httpx.Headers]] = []
        self.change: Callable[[Any], Any] = lambda answer: answer
        self.status = 200
        self.running = 0
        self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404)
        body = json.loads(request.content)
        self.asked.append((request.url.path, body, request.headers))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.running -= 1
        if self.status != 200:
            error = {"code": "unauthorized", "message": "no"}
            return httpx.Response(self.status, json={"error": error})
        answer = self.of_openai(body) if self.is_openai else self.of_sglang(body)
        return httpx.Response(200, content=json.dumps(self.change(answer)))

    def of_sglang(self, body: Any) -> Any:
        if "text" in body:
            return self.scored([ord(each) for each in body["text"]], body, 0)
        rows = enumerate(body["input_ids"])
        return [self.scored(row, body, number) for number, row in rows]

    def scored(self, row: list[int], body: Any, number: int) -> Any:
        triples = [
            [score_of(number, at) if at else None, token, None] for at, token in enumerate(row)
        ]
        return {"meta_info": {"input_token_logprobs": triples[body["logprob_start_len"] :]}}

    def of_openai(self, body: Any) -> Any:
        choices = []
        for number, row in enumerate(body["prompt"]):
            scores = [score_of(number, at) if at else None for at in range(len(row))]
            column = {
                "tokens": [*map(chr, row), "new"],
                "token_logprobs": [*scores, -99.0],
            }
            choices.append({"index": number, "logprobs": column})
        # The order is not promised.
        return {"choices": choices[::-1]}


def score_of(number: int, at: int) -> float:
    return -(number * 100.0 + at) / 8


def teacher_of(served: Served, **settings: Any) -> Teacher:
    url = "http://teacher:1/v1/" if served.is_openai else "http://teacher:1/"
    section = TeacherSection(url=url, model="m" if served.is_openai else "", **settings)
    return Teacher(section, transport=httpx.MockTransport(served))


def scored(served: Served, prompt: list[int], answers: list[list[int]]) -> list[Float32]:
    async def run() -> list[Float32]:
        async with teacher_of(served) as teacher:
            before = teacher.engines.progress
            found = await teacher.score(prompt, [np.array(each, np.int32) for each in answers])
            assert teacher.engines.progress == before + 1
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_gets_its_own_score(
    is_openai: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "secret" if seed % 2 else None
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("TEACHER_API_KEY", key)
    draw = random.Random(seed)
    prompt = [draw.randrange(99) for _ in range(draw.randint(1, 4))]
    answers = [[draw.randrange(99) for _ in range(draw.randint(1, 5))] for _ in range(3)]
    served = Served(is_openai)
    found = scored(served, prompt, answers)
    for number, (answer, scores) in enumerate(zip(answers, found, strict=True)):
        places = range(len(prompt), len(prompt) + len(answer))
        assert scores.tolist() == [score_of(number, at) for at in places]
        assert scores.dtype == np.float32
    rows = [prompt + answer for answer in answers]
    [(path, body, headers)] = served.asked
    assert headers.get("authorization") == (f"Bearer {key}" if key else None)
    assert headers["content-type"] == "application/json"
    if is_openai:
        assert path == "/v1/completions"
        assert body == {
            "model": "m",
            "prompt": rows,
            "max_tokens": 1,
            "temperature": 1,
            "echo": True,
            "logprobs": 1,
        }
    else:
        assert path == "/generate"
        assert body == {
            "input_ids": rows,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "stream": False,
            "logprob_start_len": len(prompt) - 1,
        }


def other_token(answer: Any) -> Any:
    answer[0]["meta_info"]["input_token_logprobs"][-1][1] += 1
    return answer


def no_number(answer: Any) -> Any:
    answer[0]["meta_info"]["input_token_logprobs"][-1][0] = None
    return answer


def no_number_of_openai(answer: Any) -> Any:
    answer["choices"][0]["logprobs"]["token_logprobs"][-2] = None
    return answer


def too_few_of_openai(answer: Any) -> Any:
    del answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    return answer


@pytest.mark.parametrize(
    ("is_openai", "change", "words"),
    [
        (False, other_token, "did not receive"),
        (False, no_number, "not finite"),
        (False, lambda answer: answer[:1], "no log-probabilities"),
        (False, lambda answer: {}, "no log-probabilities"),
        (False, lambda answer: [{"meta_info": {}}] * 2, "no log-probabilities"),
        (False, lambda answer: [{"meta_info": {"input_token_logprobs": [1]}}] * 2, "no log-prob"),
        (True, no_number_of_openai, "not finite"),
        (True, too_few_of_openai, "no log-probabilities"),
        (True, lambda answer: {"choices": answer["choices"][:1]}, "no log-probabilities"),
        (True, lambda answer: {"choices": [{"index": 0}, {"index": 1}]}, "no log-probabilities"),
        (True, lambda answer: {}, "no log-probabilities"),
    ],
)
def test_an_answer_that_is_unfit_is_named(is_openai: bool, change: Any, words: str) -> None:
    served = Served(is_openai)
    served.change = change
    url = "http://teacher:1/v1" if is_openai else "http://teacher:1"
    with raises(TeacherFailed, field="teacher.url", value=url, code="teacher_failed") as error:
        scored(served, [1, 2], [[3, 4], [5]])
    assert words in error.value.message


def test_as_many_groups_are_scored_at_once_as_the_setting_says() -> None:
    served = Served(False)

    async def run() -> None:
        async with teacher_of(served, concurrency=2) as teacher:
            one = [np.array([1], np.int32)]
            await asyncio.gather(*(teacher.score([1], one) for _ in range(6)))

    asyncio.run(run())
    assert served.most == 2


@pytest.mark.parametrize("is_openai", [False, True])
def test_a_key_that_is_refused_is_named(is_openai: bool) -> None:
    served = Served(is_openai)
    served.status = 401
    with pytest.raises(ServiceError) as error:
        scored(served, [1], [[2]])
    assert error.value.remedy == "set TEACHER_API_KEY in the environment of the trainer"
    # The message that a dropped group is logged with.
    assert error.value.remedy in str(error.value)
    served.status = 400
    with pytest.raises(ServiceError) as error:
        scored(served, [1], [[2]])
    assert "TEACHER_API_KEY" not in str(error.value)


def checked(served: Served) -> None:
    async def run() -> None:
        async with teacher_of(served) as teacher:
            await teacher.check(Tokenizer(), PATIENCE_S)

    asyncio.run(run())


def as_bytes(answer: Any) -> Any:
    """Writes spaces and line ends as byte-level tokenizers do."""
    for choice in answer["choices"]:
        column = choice["logprobs"]
        column["tokens"] = [
            each.replace(" ", "Ġ").replace("\n", "Ċ").replace("\t", "ĉ")
            for each in column["tokens"]
        ]
    return answer


def as_words(answer: Any) -> Any:
    """Writes spaces as SentencePiece does."""
    for choice in answer["choices"]:
        column = choice["logprobs"]
        column["tokens"] = [each.replace(" ", "▁") for each in column["tokens"]]
    return answer


@pytest.mark.parametrize(
    ("is_openai", "change"),
    [
        (False, lambda answer: answer),
        (True, lambda answer: answer),
        (True, as_bytes),
        (True, as_words),
    ],
)
def test_a_teacher_with_the_same_tokenizer_fits(is_openai: bool, change: Any) -> None:
    served = Served(is_openai)
    served.change = change
    checked(served)
    # First the probe, then a score: of all that follows its first token.
    (_, probe, _), (_, score, _) = served.asked
    if is_openai:
        assert probe["prompt"] == score["prompt"]
        text = "".join(map(chr, probe["prompt"][0]))
    else:
        text = probe["text"]
        assert probe["logprob_start_len"] == score["logprob_start_len"] == 0
        assert score["input_ids"] == [[ord(each) for each in text]]
    assert text.endswith("<end><pad>")
    assert "\n\n\t" in text


def replaced(at: int, is_openai: bool) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        if is_openai:
            answer["choices"][0]["logprobs"]["tokens"][at] = "other"
        else:
            answer["meta_info"]["input_token_logprobs"][at][1] = 7777
        return answer

    return change


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize("at", [0, 5, 40])
def test_another_tokenizer_is_named_with_the_first_difference(is_openai: bool, at: int) -> None:
    served = Served(is_openai)
    served.change = replaced(at, is_openai)
    with raises(ConfigError, field="teacher.url") as error:
        checked(served)
    message = error.value.message
    assert f"from token {at} on" in message
    there, _, here = message.partition("there and")
    assert ("other" if is_openai else "7777") in there
    assert ("other" if is_openai else "7777") not in here
    assert len(served.asked) == 1, "scores of other tokens are not asked for"


@pytest.mark.parametrize("is_openai", [False, True])
def test_a_shorter_list_of_tokens_is_another_tokenizer(is_openai: bool) -> None:
    served = Served(is_openai)

    def shorter(answer: Any) -> Any:
        if is_openai:
            del answer["choices"][0]["logprobs"]["tokens"][9:]
        else:
            del answer["meta_info"]["input_token_logprobs"][9:]
        return answer

    served.change = shorter
    with raises(ConfigError, field="teacher.url") as error:
        checked(served)
    assert "[] there" in error.value.message


@pytest.mark.parametrize("is_openai", [False, True])
def test_a_server_without_log_probabilities_does_not_fit(is_openai: bool) -> None:
    served = Served(is_openai)
    served.change = lambda answer: {"choices": [{}], "meta_info": {}}
    with raises(ConfigError, field="teacher.url") as error:
        checked(served)
    assert "does not return log-probabilities" in error.value.message

    def only_probe(answer: Any) -> Any:
        return answer if len(served.asked) == 1 else {}

    served.asked.clear()
    served.change = only_probe
    with raises(ConfigError, field="teacher.url") as error:
        checked(served)
    assert "no log-probabilities" in error.value.message
