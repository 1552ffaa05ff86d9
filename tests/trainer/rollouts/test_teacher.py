"""The teacher of on-policy distillation: over real sockets, with both APIs, with failures, and in
whole runs."""

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request, Response
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError, ServiceError
from common.settings.config import Config, load
from common.settings.sections import TeacherSection
from common.wire.schemas import Float32
from services.data.tiny import problems
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from tests.support.engines.engines import expected_logprobs, write_model
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer import OnlineRLTrainer, RewardFunction, TrainerConfig, train_in_process
from trainer.backends.server import BackgroundServer
from trainer.observe.run_dir import read_lines
from trainer.rollouts.teacher import Teacher, TeacherFailed

pytestmark = pytest.mark.integration

PROMPT, COMPLETIONS = [20, 21, 22], [[30, 31, 32], [40], [50, 51, 52, 53, 54]]


class Served:
    """An engine behind its own API and behind OpenAI's (`echo` with `logprobs`, as in vLLM); keeps
    the requests."""

    def __init__(self, directory: Path) -> None:
        self.engine = Engine(Model(directory, 256), max_running=8, weight_version="0")
        self.app = make_app(self.engine)
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answer: Callable[[int], Response | None] = lambda number: None
        """The answer, in place of the engine's, to request number n (from 1), or None."""

        @self.app.middleware("http")
        async def record(request: Request, call_next: Any) -> Any:
            if request.method == "POST":
                self.seen.append(
                    (request.url.path, dict(request.headers), json.loads(await request.body()))
                )
                if (answer := self.answer(len(self.seen))) is not None:
                    return answer
            return await call_next(request)

        @self.app.post("/v1/completions")
        async def completions(request: Request) -> dict[str, Any]:
            body = await request.json()
            model = self.engine.scheduler.model
            scores = self.engine.call(lambda scheduler: scheduler.score(body["prompt"]))
            found, _ = await asyncio.wrap_future(scores)
            choices: list[dict[str, Any]] = []
            for index, (row, scored) in enumerate(zip(body["prompt"], found, strict=True)):
                tokens = [model.tokenizer.decode([token]) for token in row]
                logprobs = [None, *scored.logprobs, -0.5]
                column = {"tokens": [*tokens, "x"], "token_logprobs": logprobs}
                choices.insert(0, {"index": index, "text": "", "logprobs": column})
            return {"choices": choices}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher") / "model", seed=0)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], tuple[Served, str]]]:
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with ExitStack() as stack:

        def started(directory: Path) -> tuple[Served, str]:
            served = Served(directory)
            server = stack.enter_context(BackgroundServer(served.app, "127.0.0.1", 0))
            return served, f"http://127.0.0.1:{server.port}"

        yield started


def settings_of(url: str, **more: Any) -> TeacherSection:
    return TeacherSection(url=url, model="tiny" if url.endswith("/v1") else "", **more)


def scored(settings: TeacherSection, prompt: list[int] = PROMPT) -> list[Float32]:
    async def run() -> list[Float32]:
        async with Teacher(settings) as teacher:
            return await teacher.score(
                prompt, [np.array(tokens, np.int32) for tokens in COMPLETIONS]
            )

    return asyncio.run(run())


def checked(settings: TeacherSection, tokenizer: Any) -> None:
    async def run() -> None:
        async with Teacher(settings) as teacher:
            await teacher.check(tokenizer, 60.0)

    asyncio.run(run())


def test_a_teacher_that_does_not_tell_its_load_gets_on_as_long_as_it_answers() -> None:
    """Six groups wait for one another for longer than the limit of each."""
    answers = 0

    async def run() -> None:
        turn = asyncio.Lock()

        async def answer(request: httpx.Request) -> httpx.Response:
            nonlocal answers
            if request.method == "GET":
                return httpx.Response(404)
            async with turn:
                await asyncio.sleep(0.5)
            answers += 1
            logprobs = [[None] + [-1.0] * len(row) for row in json.loads(request.content)["prompt"]]
            choices = [
                {"index": index, "logprobs": {"token_logprobs": row}}
                for index, row in enumerate(logprobs)
            ]
            return httpx.Response(200, json={"choices": choices})

        settings = settings_of("http://teacher/v1", timeout_s=2.0)
        async with Teacher(settings, httpx.MockTransport(answer)) as teacher:
            await asyncio.gather(
                *(teacher.score(PROMPT, [np.array([30], np.int32)]) for _ in range(6))
            )

    asyncio.run(run())
    assert answers == 6, "none was asked for twice"


@pytest.mark.parametrize("form", ["", "/", "/v1"])
def test_scores_are_the_log_probabilities_of_the_completions_tokens(
    form: str, model_dir: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    served, url = serve(model_dir)
    found = scored(settings_of(url + form))
    for tokens, logprobs in zip(COMPLETIONS, found, strict=True):
        np.testing.assert_allclose(
            logprobs, expected_logprobs(model_dir, None, PROMPT, tokens), atol=2e-5
        )
    ((path, _, body),) = served.seen
    assert path == ("/v1/completions" if form == "/v1" else "/generate")
    if form == "/v1":
        assert (body["echo"], body["logprobs"], body["model"], body["max_tokens"]) == (
            True,
            1,
            "tiny",
            1,
        )
    one_token_prompt = scored(settings_of(url + form), prompt=PROMPT[:1])
    np.testing.assert_allclose(
        one_token_prompt[1],
        expected_logprobs(model_dir, None, PROMPT[:1], COMPLETIONS[1]),
        atol=2e-5,
    )


def test_the_key_comes_from_the_environment_and_the_runs_token_stays_here(
    model_dir: Path, serve: Callable[[Path], tuple[Served, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, url = serve(model_dir)
    monkeypatch.setenv("API_TOKEN", "the-token-of-this-run")
    scored(settings_of(url))
    monkeypatch.setenv("TEACHER_API_KEY", "a-key-of-the-teacher")
    scored(settings_of(url))
    assert [headers.get("authorization") for _, headers, _ in served.seen] == [
        None,
        "Bearer a-key-of-the-teacher",
    ]


@pytest.mark.parametrize("form", ["", "/v1"])
def test_another_tokenizer_is_refused_at_the_start(
    form: str, model_dir: Path, policy_dir: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    served, url = serve(model_dir)
    own = served.engine.scheduler.model.tokenizer
    checked(settings_of(url + form), own)
    with raises(ConfigError, field="teacher.url") as caught:
        checked(settings_of(url + form), Model(policy_dir, 256).tokenizer)
    assert "model.name" in (caught.value.remedy or "")


def test_swapped_tokens_of_one_vocabulary_are_another_tokenizer(
    model_dir: Path, tmp_path: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    """The same pieces have other ids: texts split alike, but every score would belong to another
    token."""
    other = tmp_path / "swapped"
    shutil.copytree(model_dir, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    _, url = serve(other)
    own = Model(model_dir, 256).tokenizer
    for form in ("", "/v1"):
        with raises(ConfigError, field="teacher.url"):
            checked(settings_of(url + form), own)


BAD: list[Any] = [
    {},
    [],
    "no",
    [{"meta_info": {}}] * 3,
    [{"meta_info": {"input_token_logprobs": [[-1.0, 30, None]] * 9}}]
    * 3,  # the scores of other tokens
    [{"meta_info": {"input_token_logprobs": []}}] * 3,
    [
        {"meta_info": {"input_token_logprobs": [[None, token, None] for token in tokens]}}
        for tokens in COMPLETIONS
    ],
    [
        {"meta_info": {"input_token_logprobs": [[-1.0, token, None] for token in COMPLETIONS[0]]}}
    ],  # one of three
    {"choices": []},
    {"choices": [{"index": i, "logprobs": None} for i in range(3)]},
    {"choices": [{"index": i, "logprobs": {"token_logprobs": [-1.0, -1.0]}} for i in range(3)]},
    {"choices": [{"index": i, "logprobs": {"token_logprobs": [None] * 9}} for i in range(3)]},
]


@pytest.mark.parametrize("answer", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("form", ["", "/v1"])
def test_an_answer_without_scores_is_an_error_not_a_zero(
    form: str, answer: Any, model_dir: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    served, url = serve(model_dir)
    served.answer = lambda number: Response(json.dumps(answer), media_type="application/json")
    with pytest.raises(TeacherFailed):
        scored(settings_of(url + form))


def test_a_busy_endpoint_is_retried_then_given_up(
    model_dir: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    served, url = serve(model_dir)
    served.answer = lambda number: Response(status_code=503) if number < 3 else None
    assert len(scored(settings_of(url))) == 3
    assert len(served.seen) == 3
    served.answer = lambda number: Response(status_code=503)
    with raises(ServiceError, field="url"):
        scored(settings_of(url, timeout_s=0.3))


# ------------------------------------------------------------ whole runs


@pytest.fixture
def run(base_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """Makes a small run on the built-in task in its own directory."""

    def make(name: str, *more: str) -> Config:
        place = tmp_path / name
        words = [
            *(
                "--config",
                str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
                "--model.name",
                str(base_model),
            ),
            *("--trainer.run_dir", str(place), "--state_dir", str(place / "state")),
            *(
                "--trainer.batch_size",
                "4",
                "--trainer.max_steps",
                "2",
                "--sampling.group_size",
                "4",
            ),
            *(
                "--evaluation.samples",
                "0",
                "--optimizer.warmup_steps",
                "0",
                "--reward.workers",
                "1",
            ),
        ]
        config = load([*words, *more], {})
        train_in_process(config, Console(quiet=True))
        return config

    return make


def lines(config: Config) -> list[dict[str, Any]]:
    assert config.trainer.run_dir is not None
    return read_lines(config.trainer.run_dir / "metrics.jsonl")


@pytest.fixture
def damaged(base_model: Path, tmp_path: Path) -> Path:
    """The base model with noise in its weights, which answers differently."""
    shutil.copytree(base_model, tmp_path / "damaged")
    tensors, random = load_file(base_model / "model.safetensors"), torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.4 * tensor.std() * torch.randn(tensor.shape, generator=random)
        for name, tensor in tensors.items()
    }
    changed = {name: noisy[name] if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "damaged" / "model.safetensors", {"format": "pt"})
    return tmp_path / "damaged"


def divergence(student: Path, teacher: Path) -> float:
    """The mean KL(student || teacher) over the whole vocabulary at every token of 64 held-out
    solutions."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    models = [AutoModelForCausalLM.from_pretrained(model) for model in (student, teacher)]
    found = []
    for problem in itertools.islice(problems("test"), 64):
        chat = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([prompt + tokenizer(problem.solution).input_ids])
        with torch.no_grad():
            own, others = (
                model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models
            )
        found.append((own.exp() * (own - others)).sum(-1))
    return float(torch.cat(found).mean())


@pytest.mark.integration
def test_a_student_that_is_its_own_teacher_learns_nothing_and_another_teacher_is_approached(
    base_model: Path,
    damaged: Path,
    run: Callable[..., Config],
    serve: Callable[[Path], tuple[Served, str]],
) -> None:
    opd = ("--algorithm.name", "opd", "--teacher.url")
    same = lines(run("same", *opd, serve(base_model)[1], "--trainer.max_steps", "1"))
    assert abs(same[0]["update"]["teacher_kl"]) < 1e-4
    assert same[0]["update"]["grad_norm"] < 1e-2
    words = (
        "--trainer.max_steps",
        "12",
        "--trainer.batch_size",
        "8",
        "--optimizer.learning_rate",
        "1e-3",
    )
    other = run("other", *opd, serve(base_model)[1], "--model.name", str(damaged), *words)
    assert other.trainer.run_dir is not None
    trained = other.trainer.run_dir / "checkpoints" / "step_000012"
    assert divergence(trained, base_model) < 0.75 * divergence(damaged, base_model)


@pytest.mark.integration
def test_a_resumed_run_with_a_teacher_goes_on_as_an_unbroken_one(
    damaged: Path, run: Callable[..., Config], serve: Callable[[Path], tuple[Served, str]]
) -> None:
    words = ("--teacher.url", serve(damaged)[1], "--teacher.coef", "0.5")
    unbroken = run("unbroken", *words, "--trainer.max_steps", "4")
    run("broken", *words)
    resumed = run("broken", *words, "--trainer.max_steps", "4")
    for a, b in zip(lines(unbroken), lines(resumed), strict=True):
        assert a["reward"] == b["reward"]
        assert a["update"] == pytest.approx(b["update"], abs=1e-4)
    with raises(ConfigError, field="teacher.url"):
        run("broken", "--trainer.max_steps", "5")


@pytest.mark.integration
def test_a_group_that_the_teacher_does_not_score_is_dropped_counted_and_tried_again(
    damaged: Path, run: Callable[..., Config], serve: Callable[[Path], tuple[Served, str]]
) -> None:
    served, url = serve(damaged)
    served.answer = lambda number: (
        Response("[]", media_type="application/json") if number in (4, 6) else None
    )
    found = lines(run("lossy", "--algorithm.name", "opd", "--teacher.url", url))
    assert found[-1]["dropped"] == {"teacher": 2}
    assert len(found) == 2
    calls = len(served.seen)
    served.answer = lambda number: (
        Response("[]", media_type="application/json") if number > calls + 2 else None
    )
    with pytest.raises(ServiceError, match="teacher"):
        run(
            "lost",
            "--algorithm.name",
            "opd",
            "--teacher.url",
            url,
            "--limits.max_failed_groups",
            "3",
        )


class Nothing(RewardFunction):
    """Treats all answers as equal."""

    @property
    def name(self) -> str:
        return "nothing"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)


@pytest.mark.integration
def test_the_python_api_takes_a_teacher(
    base_model: Path, damaged: Path, tmp_path: Path, serve: Callable[[Path], tuple[Served, str]]
) -> None:
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_new_tokens=16,
        max_steps=2,
        kl_coef=0,
        output_dir=tmp_path / "run",
        verbose=False,
        settings={"algorithm.advantage": "none", "teacher.url": serve(damaged)[1]},
    )
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    history = OnlineRLTrainer(config, Nothing(), rows).train().history
    assert all(line["update"]["grad_norm"] > 0 for line in history)


def test_an_app_that_is_no_teacher_is_refused(model_dir: Path) -> None:
    app = FastAPI()

    @app.post("/generate")
    def generate() -> dict[str, str]:
        return {"text": "hello"}

    server = BackgroundServer(app, "127.0.0.1", 0)
    own = Model(model_dir, 256).tokenizer
    url = f"http://127.0.0.1:{server.port}"
    with server, raises(ConfigError, field="teacher.url", value=url):
        checked(settings_of(url), own)
