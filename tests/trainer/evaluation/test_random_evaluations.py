"""Evaluations whose answers, grades and verdicts are drawn at random, against the definitions of
their figures; and what is asked of engines, servers and environments for them."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request

from common.clients.base import Unreachable
from common.clients.engines import GeneratingClient
from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ConfigError
from common.process import progress
from common.process.loop_thread import LoopThread
from common.prompts.prompter import PromptStyle, TokenisedPrompt
from common.settings.config import Config
from common.wire.schemas import (
    Episode,
    EpisodeRequest,
    EpisodeSequence,
    Prompt,
    RewardItem,
    RewardResult,
    Turn,
)
from tests.support.errors import raises
from trainer.evaluation import generators
from trainer.evaluation.evaluation import PASS_K
from trainer.evaluation.evaluator import Evaluator, _graded_episode
from trainer.evaluation.generation import SEED_OFFSET, TokenGenerator, sampling_of, together
from trainer.evaluation.generators import ChatGenerator
from trainer.evaluation.verdicts import Verdicts
from trainer.rollouts.requests import sampling_seed

PROMPTS = [Prompt(id=f"p{i}", prompt=f"question {i}", ground_truth=str(i)) for i in range(4)]


class RandomServices:
    """Engines, reward-server and, if it is asked for, an environment; each answer has a text of its
    own, and a random grade that is remembered."""

    gets_tokens = False
    adapter = ("adapter", 7)

    def __init__(self, seed: int, *, plays: bool = False, environment_grades: bool = False) -> None:
        self.draw = random.Random(seed)
        self.data = self.rollout = self.reward = self
        self.environment = self if plays else None
        self.environment_gives_verdicts = True
        self.environment_grades = environment_grades
        self.asked: list[Any] = []
        self.grades: dict[str, RewardResult] = {}
        self.said: dict[int, list[str]] = {}
        """The texts of each problem, sampled ones after the greedy one."""
        self.share_verified = self.draw.choice([1.0, 0.9])

    async def eval_prompts(self, count: int) -> list[Prompt]:
        return PROMPTS[:count]

    def _new_text(self, problem: int, is_greedy: bool) -> str:
        texts = self.said.setdefault(problem, [])
        text = f"{problem} {'greedy' if is_greedy else 'sample'} {len(texts)}"
        texts.insert(0 if is_greedy else len(texts), text)
        return text

    async def answers(self, prompt_ids: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        self.asked.append({"problem": prompt_ids[0], **options})
        await asyncio.sleep(0)
        return [
            {
                "text": self._new_text(prompt_ids[0], options["temperature"] == 0),
                "output_ids": [1, 2],
                "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2},
            }
            for _ in range(options["n"])
        ]

    async def episodes(self, request: EpisodeRequest) -> list[Episode]:
        self.asked.append(request)
        problem = int(request.task.ground_truth)
        found = []
        for number in range(request.n):
            text = self._new_text(problem, request.sampling.temperature == 0)
            reward = None
            if self.environment_grades:
                self.environment_gives_verdicts = True
                reward = self.draw.choice([0.0, 0.5, 1.0])
                self.grades[text] = self._result(text, problem, reward, reward == 1, verified=True)
            found.append(episode(f"{problem}-{number}", text, reward))
        return found

    async def batch_reward(self, items: Sequence[RewardItem]) -> Any:
        graded = []
        for item in items:
            reward = self.draw.choice([0.25, 0.75])
            verified = self.draw.random() < self.share_verified
            is_right = self.draw.random() < 0.5
            text = item.response
            result = self._result(
                text, int(item.ground_truth), reward, is_right and verified, verified=verified
            )
            self.grades[text] = result
            graded.append(result)
        return SimpleNamespace(rewards=graded)

    def _result(
        self, text: str, problem: int, reward: float, correct: bool, *, verified: bool
    ) -> RewardResult:
        return RewardResult(
            reward=reward,
            extracted_answer=text,
            ground_truth=str(problem),
            correct=correct,
            status="ok",
            verified=verified,
        )


def episode(
    name: str, answer: str, reward: float | None, status: Any = "ok", detail: str = ""
) -> Episode:
    tokens = np.array([1, 2], np.int32)
    sequence = EpisodeSequence(
        prompt_ids=tokens,
        token_ids=tokens,
        mask=np.ones(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        weight_versions=[(7, 0, 2)],
        turns=[Turn(start=0, end=2)],
        finish_reason="length",
        text=answer,
    )
    return Episode(
        id=name,
        status=status,
        stop_reason="turns",
        reward=reward,
        answer=answer,
        sequences=[sequence],
        detail=detail,
    )


class Words:
    """A prompter whose only token is the number of the problem."""

    stop_token_ids = (0,)

    def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
        return [TokenisedPrompt([int(prompt.ground_truth)], "") for prompt in prompts]


def evaluated(services: RandomServices, config: Config, pass_samples: int) -> Any:
    with LoopThread() as loop:
        evaluator = Evaluator(
            config,
            services,  # type: ignore[arg-type]
            Words(),  # type: ignore[arg-type]
            loop=loop,
            verdicts=Verdicts(True),
            trained=SimpleNamespace(contain=lambda prompts: [True, False, True, False]),  # type: ignore[arg-type]
        )
        evaluator.prepare()
        return evaluator.evaluate(7, pass_samples)


@pytest.mark.parametrize("plays", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_figure_is_that_of_the_answers_that_count(seed: int, plays: bool) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 3)
    temperature = draw.choice([0.0, 0.5]) if n == 1 else 0.5
    pass_samples = draw.choice([0, 2, 4])
    config = Config(seed=5, evaluation={"samples": 4, "n": n, "temperature": temperature})
    config.environment.name = "calculator" if plays else ""
    services = RandomServices(seed, plays=plays, environment_grades=seed % 2 == 0)
    before = progress.total()
    found = evaluated(services, config, pass_samples)
    assert progress.total() >= before + len(PROMPTS)

    shares = []
    passed = []
    rewards: list[Any] = []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, found.answers, strict=True)):
        texts = services.said[number]
        of_pass = PASS_K if number < pass_samples else 0
        assert len(texts) == n + of_pass
        results = [services.grades[text] for text in texts]
        rewards += [result.reward for result in results[:n]]
        is_verified = all(result.verified for result in results)
        if is_verified:
            shares.append(fmean(result.correct for result in results[:n]))
        if is_verified and of_pass:
            passed.append(float(any(result.correct for result in results[n:])))
        assert (answer.prompt_id, answer.prompt) == (prompt.id, prompt.prompt)
        assert answer.ground_truth == prompt.ground_truth
        assert answer.response == texts[0]
        assert answer.reward == results[0].reward
        assert answer.correct == (results[0].correct if is_verified else None)

    assert found.mean_reward == pytest.approx(fmean(rewards))
    assert found.accuracy == (pytest.approx(fmean(shares)) if shares else None)
    error = pstdev(shares) / len(shares) ** 0.5 if shares else None
    assert found.standard_error == (None if error is None else pytest.approx(error))
    assert found.pass_at_k == (pytest.approx(fmean(passed)) if passed else None)
    assert (found.step, found.num_samples, found.k, found.n) == (7, 4, PASS_K, n)
    assert (found.temperature, found.verified, found.trained_on) == (temperature, True, 2)


def test_episodes_are_asked_for_with_the_settings_of_evaluation() -> None:
    config = Config(seed=5, evaluation={"samples": 2, "max_new_tokens": 9})
    config.environment.name = "calculator"
    config.sampling.temperature = 0.75
    services = RandomServices(1, plays=True)
    evaluated(services, config, 1)
    asked = sorted(
        (request.task.ground_truth, request.sampling.temperature, request.n)
        for request in services.asked
    )
    assert asked == [("0", 0.0, 1), ("0", 0.75, PASS_K), ("1", 0.0, 1)]
    assert len({request.request_id for request in services.asked}) == 3
    for request in services.asked:
        position = SEED_OFFSET + int(request.task.ground_truth)
        assert request.task.seed == sampling_seed(5, position)
        assert request.sampling.max_new_tokens == 9
        assert (request.policy.adapter, request.policy.version) == services.adapter


@pytest.mark.parametrize("detail", ["", "its tool broke"])
def test_a_lost_episode_fails_the_evaluation(monkeypatch: pytest.MonkeyPatch, detail: str) -> None:
    config = Config(seed=5, evaluation={"samples": 1})
    config.environment.name = "calculator"
    services = RandomServices(1, plays=True)

    async def lost(request: EpisodeRequest) -> list[Episode]:
        return [episode("a", "", None, status="died", detail=detail)]

    monkeypatch.setattr(services, "episodes", lost)
    with pytest.raises(GenerationFailed) as failed:
        evaluated(services, config, 0)
    assert (failed.value.code, failed.value.value) == ("episode_failed", "p0")
    assert f"died: {detail or 'turns'}" in failed.value.message


def test_no_two_answers_of_a_data_set_are_sampled_with_one_seed() -> None:
    seeds: list[int] = []

    class Client:
        async def request(self, *_: Any, json: dict[str, Any]) -> Any:
            seeds.append(json["seed"])
            choice = {"message": {"content": "4"}, "finish_reason": "stop"}
            return SimpleNamespace(json=lambda: {"choices": [choice]})

    async def generate() -> None:
        chat = ChatGenerator(Client(), "a", Config(seed=3), asyncio.Semaphore(9))  # type: ignore[arg-type]
        for index in range(60):
            answers = await chat.generate(PROMPTS[0], index, 8, greedy=False)
            assert [answer.tokens for answer in answers] == [None] * 8

    asyncio.run(generate())
    assert len(set(seeds)) == len(seeds) == 480
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("context", [None, 3, 5, 100])
def test_an_answer_may_be_as_long_as_the_models_context_has_room(context: int | None) -> None:
    config = Config(evaluation={"max_new_tokens": 4})
    asked: list[dict[str, Any]] = []

    class Engine:
        async def answers(self, token_ids: Sequence[int], **options: Any) -> list[Any]:
            asked.append(options)
            meta = {"finish_reason": {"type": "length"}, "completion_tokens": 2}
            return [{"text": "b", "meta_info": meta}]

    class Prompter:
        stop_token_ids = (9,)

        def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
            return [TokenisedPrompt([1, 2, 3], "a")]

    generator = TokenGenerator(Engine(), Prompter(), config, context)  # type: ignore[arg-type]
    work = generator.generate(PROMPTS[0], 1, 1, greedy=True)
    if context == 3:
        with raises(ConfigError, field="dataset", value="question 0"):
            asyncio.run(work)
        return
    (answer,) = asyncio.run(work)
    assert (answer.text, answer.finish_reason, answer.tokens) == ("ab", "length", 2)
    assert asked[0]["max_new_tokens"] == {None: 4, 5: 2, 100: 4}[context]
    assert asked[0]["stop_token_ids"] == (9,)
    assert not asked[0]["logprobs"]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"text": "a"},
        {"text": None, "meta_info": {}},
        {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": "x"}},
        {"text": "a", "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 1}},
    ],
)
def test_what_is_no_whole_answer_fails(answer: dict[str, Any]) -> None:
    class Engine:
        async def answers(self, *_: Any, **__: Any) -> list[Any]:
            return [answer]

    generator = TokenGenerator(Engine(), Words(), Config())  # type: ignore[arg-type]
    with pytest.raises(GenerationFailed):
        asyncio.run(generator.generate(PROMPTS[0], 0, 1, greedy=True))


@pytest.mark.parametrize("own", [0.0, 0.25])
def test_samples_are_drawn_at_the_temperature_of_evaluation_or_of_training(own: float) -> None:
    config = Config(evaluation={"temperature": own, "top_p": 0.5})
    config.sampling.temperature = 0.75
    config.sampling.stop = ["END"]
    assert sampling_of(config, greedy=True)["temperature"] == 0
    assert "top_p" not in sampling_of(config, greedy=True)
    sampled = sampling_of(config, greedy=False)
    assert sampled["temperature"] == (own or 0.75)
    assert sampled["top_p"] == 0.5
    for greedy in (True, False):
        assert sampling_of(config, greedy)["stop"] == ["END"]


def test_results_come_in_order_and_the_first_failure_ends_the_others() -> None:
    done: list[int] = []
    cancelled: list[int] = []

    async def work(number: int, turns: int, *, fails: bool = False) -> int:
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        if fails:
            raise KeyError(number)
        return number

    async def all_of(*coroutines: Any) -> list[int]:
        return await together(coroutines, done=lambda: done.append(len(done)))

    assert asyncio.run(all_of(work(0, 5), work(1, 1), work(2, 3))) == [0, 1, 2]
    assert len(done) == 3
    with pytest.raises(KeyError, match="1"):
        asyncio.run(all_of(work(0, 9**9), work(1, 1, fails=True), work(2, 0)))
    assert cancelled == [0]
    assert len(done) == 4


def answering(status: int) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, json={"data": []}))


@pytest.mark.parametrize("status", [200, 401, 403, 404])
def test_the_first_answer_of_a_server_says_whether_the_key_is_right(status: int) -> None:
    async def ask() -> Any:
        client = GeneratingClient("s", "http://s", transport=answering(status), headers={})
        async with client:
            return await generators._ask(client, "/v1/models")

    if status in (401, 403):
        with pytest.raises(ConfigError) as refused:
            asyncio.run(ask())
        assert refused.value.field == "api_key"
    else:
        assert (asyncio.run(ask()) is not None) == (status == 200)


def test_a_server_that_nobody_reaches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_FIRST_ANSWER_S", 0.01)

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async def ask() -> Any:
        transport = httpx.MockTransport(refuse)
        async with GeneratingClient("s", "http://s:1", transport=transport, headers={}) as client:
            return await generators._ask(client, "/v1/models")

    with pytest.raises(Unreachable) as failed:
        asyncio.run(ask())
    assert (failed.value.field, failed.value.value) == ("model", "http://s:1")


@pytest.mark.parametrize("url", ["http://s:1", "http://s:1/", "http://s:1/v1", "http://s:1/v1/"])
@pytest.mark.parametrize("key", [None, "secret"])
def test_a_server_gets_its_own_key_and_never_the_runs(
    monkeypatch: pytest.MonkeyPatch, url: str, key: str | None
) -> None:
    monkeypatch.setenv("API_TOKEN", "of-the-run-0123456789abcdef")

    async def made() -> RolloutClient:
        client = generators._server(RolloutClient, url, Config(), key)
        await client.close()
        return client

    client = asyncio.run(made())
    assert client.base_url == "http://s:1"
    assert client.deadline_s == Config().limits.service_timeout_s
    expected = f"Bearer {key}" if key else None
    assert client.http.headers.get("authorization") == expected


@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_model_is_loaded_with_room_for_the_longest_problem_and_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool, fails: bool
) -> None:
    config = Config(evaluation={"max_new_tokens": 4})
    config.model.name = str(tmp_path / "model") if is_directory else "name/on-the-hub"
    config.rollout.device = "cpu"
    if is_directory:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").touch()
    saved: list[tuple[str, Path]] = []
    made: list[Any] = []

    def saving(what: str) -> Any:
        return SimpleNamespace(save_pretrained=lambda path: saved.append((what, path)))

    class Prompter:
        def __init__(self, tokenizer: Any, style: PromptStyle, stops: list[int]) -> None:
            assert (style, stops) == (PromptStyle.of(config), [])
            self.tokenizer = tokenizer

        def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
            return [TokenisedPrompt([0] * (3 + number), "") for number, _ in enumerate(prompts)]

    def model(directory: Path, context: int, device: Any, *, dtype: str) -> str:
        made.append((directory, context, str(device), dtype))
        if fails:
            raise ConfigError("too large", field="max_context", remedy="another one")
        return "the model"

    quieted: list[bool] = []

    def loading(what: str, settings: Any) -> Any:
        assert settings is config.model
        return saving(what)

    monkeypatch.setattr(generators, "choose_device", lambda kind, field: f"{field} {kind}")
    monkeypatch.setattr(generators, "load_tokenizer", partial(loading, "tokenizer"))
    monkeypatch.setattr(generators, "load_model", partial(loading, "model"))
    monkeypatch.setattr(generators, "quiet", lambda: quieted.append(not made))
    monkeypatch.setattr(generators, "Prompter", Prompter)
    monkeypatch.setattr(generators, "Model", model)
    temporary = tmp_path / "temporary"
    if fails:
        with pytest.raises(ConfigError) as refused:
            generators._load(config, temporary, PROMPTS)
        assert (refused.value.field, refused.value.value) == ("model.name", config.model.name)
        assert (refused.value.message, refused.value.remedy) == ("too large", "another one")
    else:
        loaded, prompter = generators._load(config, temporary, PROMPTS)
        assert loaded == "the model"  # type: ignore[comparison-overlap]
        assert isinstance(prompter, Prompter)
    directory = tmp_path / "model" if is_directory else temporary
    assert made == [(directory, 6 + 4, "device cpu", config.model.dtype)]
    assert quieted == [True], "before it loads"
    assert saved == ([] if is_directory else [("model", temporary), ("tokenizer", temporary)])


class Slots:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.entered = 0

    async def __aenter__(self) -> None:
        self.inside += 1
        self.entered += 1

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1


@pytest.mark.parametrize("greedy", [True, False])
def test_a_chat_server_is_sent_what_is_set_and_nothing_else(greedy: bool) -> None:
    slots = Slots()
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert slots.inside >= 1
        bodies.append(json.loads(request.content))
        choice = {"message": {"content": "4"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": None})

    async def ask() -> None:
        transport = httpx.MockTransport(answer)
        async with GeneratingClient("s", "http://s", transport=transport, headers={}) as client:
            chat = ChatGenerator(client, "a", Config(), slots)
            found = await chat.generate(PROMPTS[0], 0, 3, greedy)
            assert [each.tokens for each in found] == [None] * 3

    asyncio.run(ask())
    assert (slots.entered, slots.inside) == (3, 0)
    expected = {"model", "max_tokens", "temperature", "messages"}
    for body in bodies:
        truncation = Config().evaluation.truncation().keys()
        assert body.keys() == (expected if greedy else expected | {"seed"} | truncation)


_BROKEN: list[Any] = [
    "no JSON",
    [],
    {},
    {"choices": []},
    {"choices": [{}, {}]},
    {"choices": [5]},
    {"choices": [{"message": None, "text": 4, "finish_reason": "stop"}]},
    {"choices": [{"message": {"content": "4"}, "text": "4"}]},
    {"choices": [{"message": {"content": "4"}, "text": "4", "finish_reason": "stop"}], "usage": 3},
]


@pytest.mark.parametrize("body", _BROKEN, ids=range(len(_BROKEN)))
@pytest.mark.parametrize("is_chat", [True, False])
def test_what_is_no_completion_is_shown(body: Any, is_chat: bool) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    config = Config(data={"prompt_template": "" if is_chat else "Q: {question}"})

    async def ask() -> None:
        async with GeneratingClient("s", "http://s", transport=transport, headers={}) as client:
            await ChatGenerator(client, "a", config, Slots()).generate(PROMPTS[0], 0, 1, True)

    with pytest.raises(GenerationFailed) as failed:
        asyncio.run(ask())
    assert ("chat" in failed.value.message) == is_chat
    assert str(failed.value.value) == text


def test_a_filtered_answer_names_its_problem() -> None:
    choice = {"message": {"content": "4"}, "finish_reason": "content_filter"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"choices": [choice]}))

    async def ask() -> None:
        async with GeneratingClient("s", "http://s", transport=transport, headers={}) as client:
            await ChatGenerator(client, "a", Config(), Slots()).generate(PROMPTS[2], 0, 1, True)

    with pytest.raises(GenerationFailed, match="p2 ended with content_filter") as failed:
        asyncio.run(ask())
    assert failed.value.value == "4"


def engine(asked: list[Any], slots: Slots) -> FastAPI:
    """An engine whose app says when it begins and ends."""

    async def lifespan(_: FastAPI) -> Any:
        asked.append("begins")
        yield
        asked.append("ends")

    app = FastAPI(lifespan=asynccontextmanager(lifespan))

    @app.get("/get_model_info")
    async def model_info() -> dict[str, str]:
        asked.append("model")
        return {}

    @app.post("/generate")
    async def generate(request: Request) -> list[dict[str, Any]]:
        assert slots.inside == 1
        asked.append(await request.json())
        meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 2}
        return [{"text": "b", "meta_info": meta}]

    return app


class Prompter:
    """A prompter of three tokens for every prompt."""

    def __init__(self, tokenizer: Any, style: PromptStyle, stop_token_ids: list[int]) -> None:
        self.made_of = (tokenizer, style)
        self.stop_token_ids = stop_token_ids

    def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
        return [TokenisedPrompt([1, 2, 3], "a") for _ in prompts]


def test_the_embedded_engine_lives_as_long_as_its_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(seed=6, evaluation={"max_new_tokens": 40}, sampling={"stop_token_ids": [9, 2]})
    slots = Slots()
    asked: list[Any] = []
    folders: list[Path] = []
    loaded = SimpleNamespace(eos_ids=[7, 2], max_context_tokens=30)

    def load(settings: Config, folder: Path, prompts: Sequence[Prompt]) -> Any:
        assert settings is config
        assert prompts is PROMPTS
        folders.append(folder)
        assert folder.is_dir()
        return loaded, Prompter(None, PromptStyle(), [])

    made: list[Any] = []
    monkeypatch.setattr(generators, "_load", load)
    monkeypatch.setattr(generators, "Engine", lambda model, seed: made.append((model, seed)))
    monkeypatch.setattr(generators, "make_app", lambda _: engine(asked, slots))

    async def evaluate() -> None:
        async with generators.local_generator(config, PROMPTS, slots) as generator:
            assert folders[0].is_dir()
            (answer,) = await generator.generate(PROMPTS[0], 1, 1, greedy=True)
            assert (answer.text, answer.tokens) == ("ab", 2)
        assert not folders[0].exists()

    asyncio.run(evaluate())
    assert made == [(loaded, 6)]
    begins, body, ends = asked
    assert (begins, ends) == ("begins", "ends")
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == [2, 7, 9]
    assert sampling["max_new_tokens"] == 27, "what the model has room for"
    assert sampling["sampling_seed"] == sampling_seed(6, SEED_OFFSET + 1)


def test_an_sglang_server_gets_tokens_of_the_models_own_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(evaluation={"max_new_tokens": 4}, sampling={"stop_token_ids": [9, 2]})
    slots = Slots()
    asked: list[Any] = []
    made: list[Prompter] = []

    def prompter(*arguments: Any) -> Prompter:
        made.append(Prompter(*arguments))
        return made[0]

    def server(kind: Any, url: str, settings: Config, key: str | None) -> Any:
        assert (kind, url, settings, key) == (RolloutClient, "http://s", config, "the key")
        transport = httpx.ASGITransport(engine(asked, slots))
        return RolloutClient("the server", url, transport=transport, headers={})

    monkeypatch.setattr(generators, "_FIRST_ANSWER_S", 600.0)
    monkeypatch.setattr(generators, "load_tokenizer", lambda model: ("tokenizer of", model))
    monkeypatch.setattr(generators, "Prompter", prompter)
    monkeypatch.setattr(generators, "_server", server)

    async def evaluate() -> None:
        async with generators.sglang_generator("http://s", config, "the key", slots) as generator:
            assert asked == ["model"], "which needs the key"
            await generator.generate(PROMPTS[0], 1, 1, greedy=True)

    asyncio.run(evaluate())
    assert made[0].made_of == (("tokenizer of", config.model), PromptStyle.of(config))
    sampling = asked[-1]["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["max_new_tokens"]) == ([9, 2], 4)
    assert asked[-1]["input_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    "body", [None, "no JSON", "[]", "{}", '{"data": null}', '{"data": [{}]}', '{"data": ["a"]}']
)
def test_a_server_that_does_not_list_its_models_must_be_told_which(body: str | None) -> None:
    def listed() -> Any:
        return json.loads(body or "")

    reply: Any = None if body is None else SimpleNamespace(json=listed)
    with raises(ConfigError, field="model_id", value="http://s"):
        generators._only_model(reply, "http://s")


@pytest.mark.parametrize("reward", [None, 0.5, 1.0])
@pytest.mark.parametrize("gives_verdicts", [True, False])
def test_an_episode_is_graded_by_its_environment_or_by_reward_functions(
    reward: float | None, gives_verdicts: bool
) -> None:
    graded = RewardResult(
        reward=0.25, extracted_answer="x", ground_truth="0", correct=False, status="ok"
    )
    asked: list[RewardItem] = []

    async def batch_reward(items: Sequence[RewardItem]) -> Any:
        asked.extend(items)
        return SimpleNamespace(rewards=[graded])

    services: Any = SimpleNamespace(
        environment_gives_verdicts=gives_verdicts,
        reward=SimpleNamespace(gets_tokens=True, batch_reward=batch_reward),
    )
    played = episode("a", "42", reward)
    answer, result = asyncio.run(_graded_episode(services, PROMPTS[1], played))
    assert (answer.text, answer.finish_reason, answer.tokens) == ("42", "length", 2)
    assert list(answer.token_ids or ()) == [1, 2]
    if reward is None:
        assert result is graded
        (item,) = asked
        assert (item.response, item.ground_truth) == ("42", "1")
        return
    assert asked == []
    assert (result.reward, result.ground_truth, result.status) == (reward, "1", "ok")
    assert result.verified == gives_verdicts
    assert result.correct == (gives_verdicts and reward == 1.0)


def test_a_decision_about_verdicts_is_told() -> None:
    texts = [str(Verdicts(decided)) for decided in (None, True, False)]
    assert ["tell" in text for text in texts] == [True, False, False]
    assert ["accuracy" in text for text in texts] == [False, True, False]
    assert ["gives_verdicts" in text for text in texts] == [False, False, True]


def test_a_summary_has_everything_but_the_answers() -> None:
    config = Config(seed=5, evaluation={"samples": 4})
    found = evaluated(RandomServices(1), config, 0)
    fields = vars(found)
    assert fields["answers"]
    assert found.summary() == {name: fields[name] for name in fields if name != "answers"}
