"""Evaluations of a run and of a server, with services that say what they were asked."""

import asyncio
import json
from collections.abc import Sequence
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from common.clients.engines import GeneratingClient
from common.clients.rollout import GenerationFailed
from common.errors import ConfigError
from common.process.loop_thread import LoopThread
from common.prompts.prompter import TokenisedPrompt
from common.settings.config import Config
from common.wire.schemas import Prompt, RewardItem, RewardResult
from trainer.evaluation import generators
from trainer.evaluation.evaluation import PASS_K
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.generation import SEED_OFFSET, finished
from trainer.evaluation.generators import ChatGenerator, openai_generator
from trainer.evaluation.verdicts import Verdicts, verdicts_of
from trainer.policy.trained_prompts import TrainedPrompts
from trainer.rollouts.requests import sampling_seed

PROMPTS = [Prompt(id=f"p{i}", prompt=f"question {i}", ground_truth=str(i)) for i in range(3)]


class Services:
    """Answers are `greedy 0`, `sample 0`, …; the grade of each follows from its text."""

    gets_tokens = False
    teacher = None
    environment = None

    def __init__(self, ungraded: str = "") -> None:
        self.asked: list[dict[str, Any]] = []
        self.ungraded = ungraded
        self.data = self.rollout = self.reward = self

    async def eval_prompts(self, count: int) -> list[Prompt]:
        return PROMPTS[:count]

    async def answers(self, prompt_ids: Sequence[int], **options: Any) -> list[dict[str, Any]]:
        self.asked.append({"problem": prompt_ids[0], **options})
        kind = "sample" if options["temperature"] else "greedy"
        return [
            {
                "text": f"{kind} {i}",
                "output_ids": [1, 2],
                "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2},
            }
            for i in range(options["n"])
        ]

    async def batch_reward(self, items: Sequence[RewardItem]) -> Any:
        return SimpleNamespace(rewards=[self._grade(item) for item in items])

    def _grade(self, item: RewardItem) -> RewardResult:
        kind, _, number = item.response.removeprefix("> ").partition(" ")
        problem = int(item.ground_truth)
        # Greedy: the first is right. Sampled: as many as the problem's number.
        is_right = problem == 0 if kind == "greedy" else int(number) < problem
        is_lost = item.response.endswith(self.ungraded) and bool(self.ungraded)
        return RewardResult(
            reward=None if is_lost else (0.75 if is_right else 0.25),
            extracted_answer=None,
            ground_truth=item.ground_truth,
            correct=is_right,
            status="error" if is_lost else "ok",
        )


class Words:
    """A prompter whose only token is the number of the problem."""

    stop_token_ids = (0,)

    def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
        return [TokenisedPrompt([int(prompt.ground_truth)], "> ") for prompt in prompts]


def evaluated(
    services: Services, pass_samples: int, verified: bool | None = True, **settings: Any
) -> Any:
    """Returns the evaluation after step 7 with the settings of its section."""
    config = Config(seed=5, evaluation={"samples": 3, **settings})
    with LoopThread() as loop:
        evaluator = Evaluator(
            config,
            services,  # type: ignore[arg-type]
            Words(),  # type: ignore[arg-type]
            loop=loop,
            verdicts=Verdicts(verified),
            trained=TrainedPrompts.none(),
        )
        assert evaluator.evaluate(7, pass_samples) is None, "no problems yet"
        evaluator.prepare()
        found = evaluator.evaluate(7, pass_samples)
        assert evaluator.last is found
        assert evaluator.has_problems
        return found


def test_greedy_answers_count_and_samples_beside_them_are_for_pass_at_k() -> None:
    services = Services()
    found = evaluated(services, pass_samples=2, max_new_tokens=9)
    assert (found.step, found.num_samples, found.n, found.temperature) == (7, 3, 1, 0.0)
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.standard_error == pytest.approx(pstdev([1, 0, 0]) / 3**0.5)
    assert found.mean_reward == pytest.approx(mean([0.75, 0.25, 0.25]))
    assert found.pass_at_k == 0.5, "none of problem 0, one of problem 1"
    assert [answer.response for answer in found.answers] == ["> greedy 0"] * 3
    assert [answer.correct for answer in found.answers] == [True, False, False]
    assert [answer.reward for answer in found.answers] == [0.75, 0.25, 0.25]

    asked = {(each["problem"], each["temperature"] > 0): each for each in services.asked}
    assert sorted(asked) == [(0, False), (0, True), (1, False), (1, True), (2, False)]
    for (problem, is_sampled), each in asked.items():
        assert each["n"] == (PASS_K if is_sampled else 1)
        assert each["max_new_tokens"] == 9
        assert each["sampling_seed"] == sampling_seed(5, SEED_OFFSET + problem)


def test_sampled_answers_count_and_those_for_pass_at_k_are_more() -> None:
    services = Services()
    found = evaluated(services, pass_samples=1, n=2, temperature=0.5)
    assert found.accuracy == pytest.approx(mean([0, 0.5, 1]))
    assert found.pass_at_k == 0.0
    assert (found.n, found.temperature) == (2, 0.5)
    assert [each["n"] for each in services.asked] == [2 + PASS_K, 2, 2]
    assert {each["temperature"] for each in services.asked} == {0.5}


def test_without_verdicts_there_are_only_rewards() -> None:
    found = evaluated(Services(), pass_samples=3, verified=False)
    assert (found.accuracy, found.standard_error, found.pass_at_k) == (None, None, None)
    assert [answer.correct for answer in found.answers] == [None] * 3
    assert found.mean_reward > 0
    assert not found.verified


def test_an_answer_without_a_grade_fails_the_evaluation() -> None:
    with pytest.raises(GenerationFailed) as failed:
        evaluated(Services(ungraded="sample 7"), pass_samples=1)
    assert (failed.value.code, failed.value.value) == ("not_graded", "p0")


@pytest.mark.parametrize("has_reward", [None, True, False])
@pytest.mark.parametrize("of_environment", [True, False])
@pytest.mark.parametrize("of_functions", [True, False])
def test_who_gives_the_rewards_says_whether_they_are_verdicts(
    has_reward: bool | None, of_environment: bool, of_functions: bool
) -> None:
    async def functions() -> bool:
        return of_functions

    async def environment() -> tuple[bool | None, bool]:
        return has_reward, of_environment

    services: Any = SimpleNamespace(
        reward=SimpleNamespace(gives_verdicts=functions), environment=None
    )
    assert asyncio.run(verdicts_of(services)).decided is of_functions
    services.environment = SimpleNamespace(rewards=environment)
    for recorded in (None, True, False):
        found = asyncio.run(verdicts_of(services, recorded))
        expected = {None: recorded, True: of_environment, False: of_functions}[has_reward]
        assert found.decided is expected
        assert services.environment_gives_verdicts is of_environment
        decided = found.of([True, False])
        assert decided is (False if expected is None else expected)
        assert found.of([True]) is decided, "decided once"


class Server:
    """An OpenAI-compatible server that keeps what it was sent."""

    def __init__(self, models: Sequence[str] = ("a",)) -> None:
        self.models = models
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.raw_path == b"/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        self.bodies.append((request.url.path, json.loads(request.content)))
        choice = {"message": {"content": "4"}, "text": "4", "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 1}})


def chatted(server: Server, greedy: bool, n: int = 2, **sections: Any) -> list[Any]:
    async def answers() -> list[Any]:
        transport = httpx.MockTransport(server)
        async with GeneratingClient("s", "http://s", transport=transport, headers={}) as client:
            chat = ChatGenerator(client, "a", Config(**sections), asyncio.Semaphore(2))
            return await chat.generate(PROMPTS[1], 1, n, greedy)

    return asyncio.run(answers())


def test_a_chat_server_gets_every_setting_and_a_seed_for_each_sample() -> None:
    server = Server()
    sampling = {
        "system_prompt": "Be brief.",
        "stop_token_ids": [3],
        "min_new_tokens": 2,
        "max_new_tokens": 11,
        "temperature": 0.7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    found = chatted(server, greedy=False, sampling=sampling)
    assert [(answer.text, answer.finish_reason, answer.tokens) for answer in found] == [
        ("4", "stop", 1)
    ] * 2
    (path, body), (_, other) = server.bodies
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][-1]["content"] == "question 1"
    expected = {
        "model": "a",
        "max_tokens": 11,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "temperature": 0.7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert expected.items() <= body.items()
    assert body["seed"] != other["seed"]
    assert "seed" not in (chatted(server, greedy=True) and server.bodies[-1][1])
    assert server.bodies[-1][1]["temperature"] == 0


def test_a_template_replaces_the_chat() -> None:
    server = Server()
    data = {"prompt_template": "Q: {question}\nA:"}
    (answer,) = chatted(server, True, 1, data=data, sampling={"prefill": " so"})
    path, body = server.bodies[0]
    assert (path, body["prompt"]) == ("/v1/completions", "Q: question 1\nA: so")
    assert "messages" not in body
    assert answer.text == " so4"


def test_a_server_with_one_model_need_not_be_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    async def model(server: Server, named: str | None) -> str:
        transport = httpx.MockTransport(server)

        def client(_: Any, url: str, *__: Any) -> GeneratingClient:
            return GeneratingClient("s", url, transport=transport, headers={})

        monkeypatch.setattr(generators, "_server", client)
        slots = asyncio.Semaphore(1)
        async with openai_generator("http://s", Config(), None, slots, named) as generator:
            await generator.generate(PROMPTS[0], 0, 1, greedy=True)
        return str(server.bodies[0][1]["model"])

    assert asyncio.run(model(Server(["only"]), None)) == "only"
    assert asyncio.run(model(Server(["one", "two"]), "two")) == "two"
    for models in ([], ["one", "two"]):
        with pytest.raises(ConfigError) as refused:
            asyncio.run(model(Server(models), None))
        assert (refused.value.field, refused.value.value) == ("model_id", "http://s")


@pytest.mark.parametrize(("text", "finish"), [("x", "abort"), ("x", None), (None, "stop")])
def test_an_incomplete_answer_is_no_answer(text: Any, finish: Any) -> None:
    with pytest.raises(GenerationFailed):
        finished(PROMPTS[0], text, finish, 1)
    assert finished(PROMPTS[0], "x", "length", 1).text == "x"
