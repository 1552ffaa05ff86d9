"""ModelEvaluator on a local model, and over a real socket with both kinds of server."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.clients.base import Unreachable
from common.clients.rollout import GenerationFailed
from common.errors import ConfigError, shorten
from common.wire.schemas import Prompt
from services.data.tiny import problems
from tests.support.engines.engines import engine_process
from tests.support.errors import raises
from tests.support.processes.ports import free_port
from trainer import MathRewardFunction, ModelEvaluator, RewardFunction, compare_evaluations
from trainer.backends.server import BackgroundServer
from trainer.evaluation.results import normalised_answer
from trainer.evaluation.uncertainty import maj_at_k

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def test_data() -> list[Prompt]:
    made = itertools.islice(problems("test"), 12)
    return [
        Prompt(id=f"p{i}", prompt=p.question, ground_truth=str(p.answer))
        for i, p in enumerate(made)
    ]


@pytest.fixture(scope="module")
def engine(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of the embedded engine in its own process."""
    with engine_process(
        base_model, tmp_path_factory.mktemp("engine") / "log", "--max-context-tokens", "256"
    ) as (url, _):
        yield url


@pytest.fixture(scope="module")
def reward() -> Iterator[MathRewardFunction]:
    with contextlib.closing(MathRewardFunction()) as function:
        yield function


@contextlib.contextmanager
def server(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose chat completions are `answers` in turn, the last one repeated; yields its URL
    and the bodies."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cards = {"data": [{"id": "small"}, {"id": "large"}]}
            known, allowed = (
                self.path == "/v1/models",
                self.headers["authorization"] in (None, "Bearer right"),
            )
            self._send(
                200 if known and allowed else 401 if known else 404, cards if allowed else {}
            )

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._send(*answers[min(len(bodies), len(answers)) - 1])

        def _send(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", bodies
        finally:
            http.shutdown()
            thread.join()


def chat(text: str | None, finish: str = "stop") -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]
    }


def test_results_of_a_local_model(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    results = ModelEvaluator(base_model, max_new_tokens=24).evaluate(test_data, reward, k=4)
    assert results["num_samples"] == len(results["rewards"]) == len(results["responses"]) == 12
    assert results["ground_truths"] == [prompt.ground_truth for prompt in test_data]
    assert (
        results["accuracy"]
        == sum(reward or 0 for reward in results["rewards"]) / 12
        == results["mean_reward"]
    )
    assert results["confidence_interval"] is not None
    low, high = results["confidence_interval"]
    assert low < results["accuracy"] < high
    assert results["standard_error"] == pytest.approx(
        (results["accuracy"] * (1 - results["accuracy"]) / 12) ** 0.5
    )
    for response, score, truth, answer in zip(
        results["responses"],
        results["rewards"],
        results["ground_truths"],
        results["extracted_answers"],
        strict=True,
    ):
        assert response.endswith(f"#### {truth}") == (score == 1)
        assert response.endswith(f"#### {answer}")
    assert [len(row) for row in results["samples"]] == [4] * 12
    shares = [sum(sample["correct"] for sample in row) / 4 for row in results["samples"]]
    assert results["avg_at_k"] == pytest.approx(sum(shares) / 12)
    assert results["pass_at_k"] == pytest.approx(sum(share > 0 for share in shares) / 12)
    assert results["pass_at"] is not None
    assert list(results["pass_at"]) == [1, 2, 4]
    assert results["pass_at"][1] == pytest.approx(results["avg_at_k"])
    assert results["maj_at_k"] is not None
    assert results["pass_at_k"] is not None
    assert 0 <= results["maj_at_k"] <= results["pass_at_k"]
    assert results["lengths"] is not None
    assert 0 < results["lengths"]["mean"] <= results["lengths"]["longest"] <= 24
    json.dumps(results)  # only plain data


def test_an_evaluation_is_repeatable(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    first, again = (
        ModelEvaluator(base_model, max_new_tokens=24).evaluate(test_data, reward, 2) for _ in "ab"
    )
    assert first == again
    other = ModelEvaluator(base_model, max_new_tokens=24, seed=1).evaluate(test_data, reward, 2)
    assert other["responses"] == first["responses"]  # greedy, so the seed has no effect
    assert other["samples"] != first["samples"]


@pytest.fixture(scope="module")
def chat_server(engine: str, base_model: Path) -> Iterator[str]:
    """Yields the URL of a server of OpenAI's chat completions, which the embedded engine answers."""
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "small"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        sampling = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        if "seed" in body:
            sampling["sampling_seed"] = body["seed"]
        async with httpx.AsyncClient(base_url=engine, timeout=60) as client:
            request = {"input_ids": prompt, "sampling_params": sampling}
            answer = (await client.post("/generate", json=request)).json()
        choice = {
            "message": {"role": "assistant", "content": answer["text"]},
            "finish_reason": answer["meta_info"]["finish_reason"]["type"],
        }
        usage = {"completion_tokens": answer["meta_info"]["completion_tokens"]}
        return {"choices": [choice], "usage": usage}

    with BackgroundServer(app, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_the_same_model_behind_a_socket(
    engine: str,
    chat_server: str,
    base_model: Path,
    test_data: list[Prompt],
    reward: MathRewardFunction,
) -> None:
    """OpenAI's chat completions, SGLang's native call and the local model give the same answers."""
    local = ModelEvaluator(base_model, max_new_tokens=24).evaluate(test_data, reward, k=2)
    native = ModelEvaluator(engine, tokenizer=base_model, max_new_tokens=24).evaluate(
        test_data, reward, k=2
    )
    assert local["trained_on"] == [False] * len(test_data)
    local["trained_on"] = None  # a server does not say
    assert {**native, "model": ""} == {**local, "model": ""}
    for url in (chat_server, f"{chat_server}/v1"):
        served = ModelEvaluator(url, max_new_tokens=24, concurrency=3).evaluate(
            test_data, reward, k=2
        )
        assert served["responses"] == local["responses"]
        assert served["lengths"] == local["lengths"]
        assert len({sample["response"] for row in served["samples"] for sample in row}) > 1


def test_a_model_whose_context_is_short_writes_less(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    results = ModelEvaluator(base_model, max_new_tokens=100_000).evaluate(test_data[:2], reward)
    assert results["num_samples"] == 2
    long = [{"prompt": "apples and eggs " * 200, "answer": 1}]
    with raises(ConfigError, field="dataset", value=shorten(long[0]["prompt"])):
        ModelEvaluator(base_model).evaluate(long, reward)


def test_prompts_and_sampling_are_sent_to_a_server(
    test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    """A template replaces the chat, so the server completes a text; without a template the server
    builds the chat."""
    sampling = {
        "sampling.top_p": 0.9,
        "sampling.stop": ["##"],
        "sampling.min_new_tokens": 2,
        "sampling.stop_token_ids": [7],
    }
    bare = {"data.prompt_template": "Q: {question}", "sampling.prefill": " So"}
    done = {
        "choices": [{"text": " 3.", "finish_reason": "stop"}],
        "usage": {"completion_tokens": 3},
    }
    with server((200, done)) as (url, bodies):
        results = ModelEvaluator(url, model_id="small", settings=sampling | bare).evaluate(
            test_data[:1], reward, k=2
        )
    assert results["responses"] == [" So 3."]
    assert {body["prompt"] for body in bodies} == {f"Q: {test_data[0].prompt} So"}
    assert [(body["stop"], body["min_tokens"], body["stop_token_ids"]) for body in bodies] == [
        (["##"], 2, [7])
    ] * 3
    assert sorted(body.get("top_p", 1.0) for body in bodies) == [
        0.9,
        0.9,
        1.0,
    ]  # the greedy one has none
    assert not any("top_k" in body for body in bodies)  # not every server knows it

    chat: dict[str, Any] = {"data.prompt_template": "Q: {question}", "model.chat_template": "own"}
    chat["sampling.chat_template_kwargs"] = {"enable_thinking": False}
    answered = {"choices": [{"message": {"content": "3"}, "finish_reason": "stop"}]}
    with server((200, answered)) as (url, bodies):
        ModelEvaluator(url, model_id="small", settings=chat).evaluate(test_data[:1], reward)
    assert bodies[0]["messages"] == [{"role": "user", "content": f"Q: {test_data[0].prompt}"}]
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_system_prompt_is_sent(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    with server((200, chat("#### 1"))) as (url, bodies):
        ModelEvaluator(url, model_id="small", system_prompt="Think.").evaluate(
            test_data[:1], reward
        )
    assert bodies[0]["messages"] == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": test_data[0].prompt},
    ]
    assert (bodies[0]["model"], bodies[0]["temperature"], bodies[0]["max_tokens"]) == (
        "small",
        0,
        512,
    )


def test_a_busy_server_is_asked_again(test_data: list[Prompt], reward: MathRewardFunction) -> None:
    with server((503, {}), (429, {}), (200, chat(f"#### {test_data[0].ground_truth}"))) as (
        url,
        bodies,
    ):
        results = ModelEvaluator(url, model_id="small").evaluate(test_data[:1], reward)
    assert len(bodies) == 3
    assert results["accuracy"] == 1
    assert results["lengths"] is None  # this server reports no token counts


def test_a_server_that_does_not_answer_is_named(
    test_data: list[Prompt], monkeypatch: pytest.MonkeyPatch, reward: MathRewardFunction
) -> None:
    monkeypatch.setattr("trainer.evaluation.generators._FIRST_ANSWER_S", 0.5)
    url = f"http://127.0.0.1:{free_port()}"
    with raises(Unreachable, field="model"):
        ModelEvaluator(url).evaluate(test_data, reward)


def test_a_refusal_of_a_server_is_reported(
    test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    with server((200, chat(None, "content_filter"))) as (url, _):
        with raises(ConfigError, field="model_id"):
            ModelEvaluator(url).evaluate(test_data, reward)
        with raises(ConfigError, field="api_key"):
            ModelEvaluator(url, model_id="small", api_key="wrong").evaluate(test_data, reward)
        with pytest.raises(GenerationFailed, match="the answer to p0 ended with content_filter"):
            ModelEvaluator(url, model_id="small", api_key="right").evaluate(test_data[:1], reward)
    with (
        server((200, {"choices": []})) as (url, _),
        pytest.raises(GenerationFailed, match="not the answer of a chat completion"),
    ):
        ModelEvaluator(url, model_id="small").evaluate(test_data[:1], reward)


class Unsure(RewardFunction):
    """Cannot score the first problem."""

    name = "unsure"
    gives_verdicts = True

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float("nan") if prompt.endswith("?first") else 1.0 for prompt in kwargs["prompt"]]


def test_ungraded_problems_are_counted_and_left_out(base_model: Path) -> None:
    rows = [{"prompt": "1+1?first"}, {"prompt": "1+1?second"}, {"prompt": "1+1?third"}]
    results = ModelEvaluator(base_model, max_new_tokens=8).evaluate(rows, Unsure(), k=2)
    assert (results["accuracy"], results["num_samples"], results["num_ungraded"]) == (1, 3, 3)
    assert results["rewards"] == [None, 1, 1]
    assert results["correct"] == [None, True, True]
    assert results["pass_at_k"] == 1
    with raises(GenerationFailed, code="not_graded"):
        ModelEvaluator(base_model, max_new_tokens=8).evaluate(rows[:1], Unsure())


def test_an_empty_data_set_is_an_error(base_model: Path, reward: MathRewardFunction) -> None:
    with raises(ConfigError, field="dataset", value="[]"):
        ModelEvaluator(base_model).evaluate([], reward)


@pytest.mark.parametrize(
    ("model", "arguments", "field"),
    [
        ("m", {"max_new_tokens": 0}, "max_new_tokens"),
        ("m", {"temperature": 0}, "temperature"),
        ("m", {"api_key": "x"}, "api_key"),
        ("m", {"tokenizer": "x"}, "tokenizer"),
        ("http://h", {"tokenizer": "x", "model_id": "y"}, "tokenizer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    model: str, arguments: dict[str, Any], field: str
) -> None:
    with raises(ConfigError, field=field):
        ModelEvaluator(model, **arguments)


def test_a_missing_model_is_refused(
    tmp_path: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    with raises(ConfigError, value=str(tmp_path / "nothing")):
        ModelEvaluator(tmp_path / "nothing").evaluate(test_data, reward)


@pytest.mark.slow
def test_a_model_that_lacks_a_layer_is_no_model_with_an_accuracy_of_0(
    base_model: Path, tmp_path: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    """transformers would complete it with random numbers."""
    incomplete = tmp_path / "model"
    shutil.copytree(base_model, incomplete)
    tensors = load_file(base_model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(kept, incomplete / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, field="model.name", value=str(incomplete)) as caught:
        ModelEvaluator(incomplete, progress=False).evaluate(test_data, reward)
    assert "model.layers.1." in caught.value.message


def test_a_model_of_the_hub(
    base_model: Path,
    test_data: list[Prompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: MathRewardFunction,
) -> None:
    """Uses a cache of the hub as `huggingface_hub` lays it out, without network."""
    home = tmp_path / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    (home / "snapshots").mkdir()
    (home / "snapshots" / ("0" * 40)).symlink_to(base_model.resolve())
    code = (
        "import sys; from trainer import MathRewardFunction, ModelEvaluator\n"
        "rows = [{'prompt': sys.argv[1], 'answer': 1}]\n"
        "print(ModelEvaluator('org/tiny', max_new_tokens=24).evaluate(rows, MathRewardFunction())['responses'][0])"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, test_data[0].prompt],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    local = ModelEvaluator(base_model, max_new_tokens=24).evaluate(test_data[:1], reward)
    assert done.stdout.strip() == local["responses"][0]


@pytest.mark.parametrize(
    ("answers", "right", "accuracy"),
    [
        (
            ["\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", "\\boxed{3}"],
            "110",
            1,
        ),  # by number: 1/2 and 0.5 are equal
        (["\\boxed{3}", "#### 1/2", "The answer is 0.5.", "\\boxed{3}", ".5"], "01101", 1),
        (
            ["\\boxed{1,080}", "\\boxed{\\$1080}", "\\boxed{1080.00}", "\\boxed{7}", "\\boxed{7}"],
            "00011",
            0,
        ),
        (["\\boxed{1{,}080}", "1080 apples", "7", "7"], "1100", 0.5),  # a tie
        (["1", "2", "3", "4"], "0010", 0.25),
        (["\\boxed{x+1}", "\\boxed{x + 1}", "\\boxed{1}"], "110", 1),
        (
            ["I do not know.", "", "No idea", "\\boxed{5}"],
            "0001",
            1,
        ),  # a missing answer has no vote
        (
            ["\\boxed{7|8}", "\\boxed{7|8}", "\\boxed{7}"],
            "001",
            0,
        ),  # an answer that cannot be parsed votes as its text
        (["I do not know.", "Nor do I."], "00", 0),
    ],
)
def test_answers_vote_by_their_numbers(answers: list[str], right: str, accuracy: float) -> None:
    assert (
        maj_at_k(
            [normalised_answer(answer) for answer in answers], [digit == "1" for digit in right]
        )
        == accuracy
    )


def test_evaluation_works_while_an_event_loop_runs(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    async def cell() -> float | None:
        return ModelEvaluator(base_model, max_new_tokens=24).evaluate(test_data[:2], reward)[
            "accuracy"
        ]

    assert asyncio.run(cell()) is not None


def test_evaluations_in_several_threads_at_once_end_as_one_alone(
    base_model: Path, test_data: list[Prompt]
) -> None:
    def responses(_: int = 0) -> list[str]:
        with contextlib.closing(MathRewardFunction()) as reward:
            evaluator = ModelEvaluator(base_model, max_new_tokens=8, progress=False)
            return evaluator.evaluate(test_data[:2], reward)["responses"]

    alone = responses()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(responses, range(4))) == [alone] * 4
    assert responses() == alone


def test_two_evaluations_are_compared_problem_by_problem(
    base_model: Path, test_data: list[Prompt], reward: MathRewardFunction
) -> None:
    long, short = (
        ModelEvaluator(base_model, max_new_tokens=limit).evaluate(test_data, reward)
        for limit in (24, 1)
    )
    found = compare_evaluations(long, short)
    assert long["accuracy"] is not None
    assert short["accuracy"] is not None
    assert found.difference == pytest.approx(long["accuracy"] - short["accuracy"])
    assert found.gained == [i for i in range(12) if long["correct"][i] and not short["correct"][i]]
    other = ModelEvaluator(base_model, max_new_tokens=1).evaluate(test_data[:5], reward)
    with raises(ConfigError, field="second"):
        compare_evaluations(long, other)
