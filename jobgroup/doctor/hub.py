"""Availability of models and data sets (folder, cache or hub), and the clock, from a response's
Date header.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from common.process.topology import CRITIC, DATA, ENVIRONMENT, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.network import compare_clocks
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect

_TIMEOUT_S = 5.0
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ON_HUB = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""As in services/data/loaders_math.py, whose import takes seconds and fails in a light
environment."""
_NO_ACCESS = "ask for access on its page and set HF_TOKEN (--secret HF_TOKEN); the hub gives the same answer for a wrong name"
_ANSWERS = {
    401: (": gated, private or not there", _NO_ACCESS),
    403: (": gated, private or not there", _NO_ACCESS),
    404: (": no such name", "correct the name"),
}
_ELSEWHERE = (
    ", or fetch it where the hub is reachable and copy the cache (HF_HOME), or name a folder"
)
_MAKE_TINY = "trainer.tiny_model"


class Hub:
    """The hub as the processes of a task reach it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        home = Path(
            env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
        ).expanduser()
        self.cache = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
        self.endpoint = (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.shown = re.sub(r"//[^@/]*@", "//", self.endpoint)  # it may contain a password
        switches = (
            env.get(name, "").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        )
        self.offline = any(switch in ("1", "on", "yes", "true") for switch in switches)
        path = Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()
        self.token = env.get("HF_TOKEN") or (
            path.read_text().strip() if os.access(path, os.R_OK) and path.is_file() else ""
        )

    def cached(self, kind: str, name: str) -> Path | None:
        """Returns the newest snapshot in the cache that has files."""
        folder = self.cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
        found = (
            [path for path in folder.iterdir() if any(path.iterdir())]
            if os.access(folder, os.R_OK | os.X_OK)
            else []
        )
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def look_up(
        self, title: str, path: str, cached: Path | None
    ) -> tuple[Result, httpx.Response | None]:
        """Asks the hub once, with token and proxies; returns the result, and the response if the
        hub has the path.
        """
        problem, fix, elsewhere = (
            "the hub is switched off (HF_HUB_OFFLINE)",
            "unset HF_HUB_OFFLINE",
            _ELSEWHERE,
        )
        if not self.offline:
            headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
            try:
                response = httpx.get(
                    f"{self.endpoint}/{path}",
                    headers=headers,
                    follow_redirects=True,
                    timeout=_TIMEOUT_S,
                )
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{self.shown} does not answer: {str(error) or type(error).__name__}"
                fix = "allow access (HTTPS_PROXY), set HF_ENDPOINT to a mirror"
            else:
                if response.is_success:
                    return Result(
                        title, "ok", f"{'cached, and ' if cached else ''}on {self.shown}"
                    ), response
                meaning, fix = _ANSWERS.get(
                    response.status_code, ("", "try again later, or another HF_ENDPOINT")
                )
                problem, elsewhere = f"{self.shown} says {response.status_code}{meaning}", ""
                problem += "" if self.token else " (there is no HF_TOKEN)"
        if cached is None:
            return Result(title, "fail", problem, fix + elsewhere), None
        fix = "set HF_HUB_OFFLINE=1 to avoid waiting for the hub"
        return expect(title, self.offline, f"cached, but {problem}", fix, "warn"), None


def models(plan: Plan) -> dict[str, PlannedTask]:
    """Returns the models (of the environment-server: the tokenizer) that processes here load, each
    with a task that does.
    """
    found: dict[str, PlannedTask] = {}
    for job in plan.here:
        config, learns = job.config, job.name in (TRAINER, CRITIC)
        names = {
            config.model.name: learns or job.name in (ROLLOUT, ENVIRONMENT),
            config.model.reference: job.name == TRAINER and config.algorithm.kl_coef,
            config.critic.model: learns and config.algorithm.needs_critic,
            config.reward.reward_model_name: job.name == REWARD
            and "reward_model" in config.reward.function_names(),
        }
        for name in [name for name, used in names.items() if name and used]:
            found.setdefault(name, job)
    return found


def check_model(plan: Plan, name: str, job: PlannedTask) -> Iterator[Result]:
    """Looks for the model, and puts the content of its config.json into the plan's shapes."""
    title, folder, hub = f"model {name}", job.path(name), Hub(job.env)
    cached = folder if folder.is_dir() else hub.cached("model", name)
    if cached is not None and (cached / "config.json").is_file():
        plan.shapes[name] = json.loads((cached / "config.json").read_text(encoding="utf-8"))
    if folder.is_dir():
        fix = "name a folder that save_pretrained wrote"
        yield expect(
            title,
            name in plan.shapes,
            f"a folder with{'' if name in plan.shapes else 'out'} config.json",
            fix,
        )
    elif _REPOSITORY.fullmatch(name):
        result, response = hub.look_up(title, f"{name}/resolve/main/config.json", cached)
        if response is not None:
            plan.shapes.setdefault(name, response.json())
        yield result
    elif plan.demo or _MAKE_TINY in (job.setup or ""):
        yield Result(title, "ok", "not there yet; make demo, or the task's setup, makes it")
    else:
        fix = f"make it: .venv/bin/python -m {_MAKE_TINY} {name}; or name another with MODEL_NAME"
        yield Result(title, "fail", f"there is no folder {folder}", fix)


def check_dataset(plan: Plan) -> Iterator[Result]:
    """Looks for the prompts."""
    if (job := plan.job(DATA)) is None:
        return
    source, hub = job.config.data.source, Hub(job.env)
    title, name = f"data set {source}", _ON_HUB.get(source, source.removeprefix("math:"))
    file = job.path(name).suffix in (".jsonl", ".json", ".csv", ".parquet")
    if source == "tiny" or (source not in _ON_HUB and job.path(name).exists()):
        yield Result(title, "ok", "generated on the spot" if source == "tiny" else "here in files")
    elif file or "/" not in name or not _REPOSITORY.fullmatch(name):
        yield Result(
            title,
            "fail",
            f"there is no {job.path(name)}",
            "correct data.source: a file, a folder, or org/name on the hub",
        )
    else:
        result, response = hub.look_up(title, f"api/datasets/{name}", hub.cached("dataset", name))
        gated = response is not None and response.json().get("gated") and not hub.token
        yield (
            Result(title, "fail", "gated, and there is no HF_TOKEN", _NO_ACCESS)
            if gated
            else result
        )


def check_clock(plan: Plan) -> Iterator[Result]:
    """Compares our clock with the hub's, or with that of the package index."""
    hub = Hub(os.environ)
    for url in [] if hub.offline else [hub.endpoint, "https://pypi.org/simple/"]:
        with suppress(httpx.HTTPError, httpx.InvalidURL):
            sent = time.time()
            yield compare_clocks(
                f"clock of {httpx.URL(url).host}", httpx.head(url, timeout=_TIMEOUT_S / 2), sent
            )
            return
    yield Result("clock", "ok", "not compared: neither the hub nor the package index answers")
