"""The lab of one fault: a tiny run in a process of its own, and what is needed to disturb it.

Everything here runs in the process of the fault (`checks.faults.child`).
"""

import json
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from fastapi import FastAPI

from common.errors import ConfigError, ServiceError
from common.process.cli import fail
from common.process.logs import setup_logging
from common.settings.config import Config, load
from services.data.tiny import problems
from trainer.api.grpo import GRPOConfig, GRPOTrainer
from trainer.backends.in_process import WrapApp
from trainer.start.in_process import train_in_process

ROOT = Path(__file__).resolve().parents[2]
STRUCK = "struck"
"""File in the directory of a fault: the seconds of the monotonic clock at which it struck."""
GROUPS = 4
"""Groups of one step."""
GROUP_SIZE = 8
Chat = list[dict[str, str]]
Answers = list[dict[str, Any]]
Change = Callable[[int, dict[str, Any], Answers], Answers | httpx.Response]
"""(number of the call, its body, the engine's answers) -> the answers that arrive."""


@dataclass
class Lab:
    """The directory, the seed and the tiny run of one fault."""

    name: str
    seed: int
    directory: Path
    model: Path
    """The base model of the built-in task."""
    rng: random.Random = field(init=False)
    strike_step: int = field(init=False)
    """The fault strikes after this many steps, if it can choose."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.name} {self.seed}")
        self.strike_step = self.rng.randint(1, 3)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def state_dir(self) -> Path:
        return self.run_dir / "state"

    def strike(self) -> None:
        """Notes that the fault strikes now; only the first call counts."""
        path = self.directory / STRUCK
        if not path.exists():
            path.write_text(str(time.monotonic()))

    # ------------------------------------------------------------ the built-in task

    def settings(self, **values: Any) -> Config:
        """Returns the settings of a small run of the built-in task; `trainer__max_steps=3` sets
        `trainer.max_steps`.
        """
        small: dict[str, Any] = {
            "config": ROOT / "jobgroup/configs/tiny-cpu.yaml",
            "model.name": self.model,
            "trainer.run_dir": self.run_dir,
            "state_dir": self.state_dir,
            "seed": self.seed,
            "trainer.batch_size": GROUPS,
            "sampling.group_size": GROUP_SIZE,
            "trainer.max_steps": 6,
            "evaluation.samples": 0,
            "optimizer.warmup_steps": 0,
            "checkpoint.every": 2,
            "reward.workers": 1,
        }
        small |= {name.replace("__", "."): value for name, value in values.items()}
        words: list[str] = []
        for name, value in small.items():
            words += [f"--{name}", value if isinstance(value, str) else _word(value)]
        return load(words, {})

    def train(
        self, config: Config | None = None, change: Change | None = None, **options: Any
    ) -> None:
        """Trains as the trainer of a job group does, in this process; `change` disturbs the
        engine's answers.
        """
        if config is None:
            config = self.settings()
        self.log(config)
        wrap: WrapApp | None = None
        if change is not None:
            wrap = self._disturbed(change)
        train_in_process(config, None, wrap, **options)

    @staticmethod
    def log(config: Config) -> None:
        """Logs as the trainer of a job group does."""
        setup_logging("ppo-trainer-rank0", config.state_dir / "logs")

    def _disturbed(self, change: Change) -> WrapApp:
        return lambda app: Disturbed(app, change)

    @property
    def first_call(self) -> int:
        """The first call of `/generate` after `strike_step` steps."""
        return self.strike_step * GROUPS

    # ------------------------------------------------------------ a user's script

    def rows(self, count: int = 256) -> list[dict[str, Any]]:
        """Returns rows of the built-in task, as a user's script has them: chats."""
        stream = problems("train", self.seed)
        rows: list[dict[str, Any]] = []
        for _ in range(count):
            problem = next(stream)
            chat = [{"role": "user", "content": problem.question}]
            rows.append({"prompt": chat, "ground_truth": str(problem.answer)})
        return rows

    def script(
        self, *rewards: Any, rows: Any = None, environment: Any = None, **arguments: Any
    ) -> None:
        """Trains as a script with TRL's names does."""
        small: dict[str, Any] = {
            "output_dir": str(self.run_dir),
            "per_device_train_batch_size": GROUPS * GROUP_SIZE,
            "num_generations": GROUP_SIZE,
            "max_steps": 14,
            "max_completion_length": 24,
            "learning_rate": 5e-4,
            "save_steps": 2,
            "use_cpu": True,
            "report_to": "none",
            "seed": self.seed,
        }
        small |= arguments
        trainer = GRPOTrainer(
            model=str(self.model),
            reward_funcs=list(rewards) or None,
            args=GRPOConfig(**small),
            train_dataset=self.rows() if rows is None else rows,
            environment_factory=environment,
        )
        trainer.train()


def texts(completions: list[Chat]) -> list[str]:
    """Returns the texts of completions, as a reward function gets them."""
    return [completion[0]["content"] for completion in completions]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)


class Disturbed(httpx.AsyncBaseTransport):
    """The connection to the engine; `change` may change the answers that come back."""

    def __init__(self, app: FastAPI, change: Change) -> None:
        self._inner = httpx.ASGITransport(app)
        self._change = change
        self._calls = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return await self._inner.handle_async_request(request)
        number = self._calls
        self._calls += 1
        body = json.loads(await request.aread())
        response = await self._inner.handle_async_request(request)
        answers = json.loads(await response.aread())
        if not isinstance(answers, list):
            answers = [answers]
        changed = self._change(number, body, answers)
        return changed if isinstance(changed, httpx.Response) else httpx.Response(200, json=changed)


@contextmanager
def replaced(target: str, value: Any) -> Iterator[None]:
    """Replaces a part of the program inside the block: a device or a library that fails."""
    with mock.patch(target, value):
        yield


def run(fault_run: Callable[[Lab], None], lab: Lab) -> int:
    """Runs a fault as its program would: prints the error that ends it, and returns the status."""
    try:
        fault_run(lab)
    except ConfigError as error:
        return _failed(error, 2)
    except ServiceError as error:
        return _failed(error, 1)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _failed(error: ServiceError, status: int) -> int:
    try:
        fail(error, status)
    except SystemExit:
        return status
