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
from common.settings.rewards import ModelReward
from jobgroup.doctor.network import compare_clocks
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect

_TIMEOUT_S = 5.0
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ON_HUB = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""As in services/data/loaders_math.py, whose import takes seconds and fails in a light
environment."""
_NO_ACCESS = (
    "ask for access on its page and set HF_TOKEN (--secret HF_TOKEN); "
    "the hub gives the same answer for a wrong name"
)
_ANSWERS = {
    401: (": gated, private or not there", _NO_ACCESS),
    403: (": gated, private or not there", _NO_ACCESS),
    404: (": no such name", "correct the name"),
}
"""By status: its meaning and the remedy."""
_ELSEWHERE = (
    ", or fetch it where the hub is reachable and copy the cache (HF_HOME), or name a folder"
)
_MAKE_TINY = "trainer.tiny_model"


class Hub:
    """The hub as the processes of a task reach it.

    `huggingface_hub` reads these variables once, from the environment of the process that imports
    it; here they are those of each task.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        caches = Path(env.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(env.get("HF_HOME") or caches / "huggingface").expanduser()
        self.cache = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
        self.endpoint = (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.shown = re.sub(r"//[^@/]*@", "//", self.endpoint)  # it may contain a password

        switches = [env.get("HF_HUB_OFFLINE", ""), env.get("TRANSFORMERS_OFFLINE", "")]
        self.offline = any(switch.lower() in ("1", "on", "yes", "true") for switch in switches)

        self.token = env.get("HF_TOKEN", "")
        token_file = Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()
        if not self.token and token_file.is_file() and os.access(token_file, os.R_OK):
            self.token = token_file.read_text().strip()

    def cached(self, kind: str, name: str) -> Path | None:
        """Returns the newest snapshot in the cache that has files."""
        folder = self.cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
        if not os.access(folder, os.R_OK | os.X_OK):
            return None
        snapshots = [path for path in folder.iterdir() if any(path.iterdir())]
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)

    def look_up(
        self, title: str, path: str, cached: Path | None
    ) -> tuple[Result, httpx.Response | None]:
        """Asks the hub once, with token and proxies; returns the result, and the response if the
        hub has the path.
        """
        response, problem, fix = self._ask(path)
        if response is not None:
            found = f"{'cached, and ' if cached else ''}on {self.shown}"
            return Result(title, "ok", found), response
        if cached is None:
            return Result(title, "fail", problem, fix), None
        fix = "set HF_HUB_OFFLINE=1 to avoid waiting for the hub"
        return expect(title, self.offline, f"cached, but {problem}", fix, "warn"), None

    def _ask(self, path: str) -> tuple[httpx.Response | None, str, str]:
        """Returns the hub's response if it has `path`; otherwise the problem and the fix."""
        if self.offline:
            fix = f"unset HF_HUB_OFFLINE{_ELSEWHERE}"
            return None, "the hub is switched off (HF_HUB_OFFLINE)", fix
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        url = f"{self.endpoint}/{path}"
        try:
            response = httpx.get(url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            fix = f"allow access (HTTPS_PROXY), set HF_ENDPOINT to a mirror{_ELSEWHERE}"
            return None, f"{self.shown} does not answer: {reason}", fix
        if response.is_success:
            return response, "", ""
        unknown = ("", "try again later, or another HF_ENDPOINT")
        meaning, fix = _ANSWERS.get(response.status_code, unknown)
        without_token = "" if self.token else " (there is no HF_TOKEN)"
        return None, f"{self.shown} says {response.status_code}{meaning}{without_token}", fix


def models(plan: Plan) -> dict[str, PlannedTask]:
    """Returns the models (of the environment-server: the tokenizer) that processes here load, each
    with a task that does.
    """
    found: dict[str, PlannedTask] = {}
    for job in plan.here:
        for name in _models_of(job):
            if name:
                found.setdefault(name, job)
    return found


def _models_of(job: PlannedTask) -> Iterator[str]:
    config = job.config
    learns = job.name in (TRAINER, CRITIC)
    if learns or job.name in (ROLLOUT, ENVIRONMENT):
        yield config.model.name
    if job.name == TRAINER and config.algorithm.kl_coef:
        yield config.model.reference
    if learns and config.algorithm.needs_critic:
        yield config.critic.model
    reward_model = config.reward.function(ModelReward)
    if job.name == REWARD and reward_model is not None:
        yield reward_model.model


def check_model(plan: Plan, name: str, job: PlannedTask) -> Iterator[Result]:
    """Looks for the model, and puts the content of its config.json into the plan's shapes."""
    title = f"model {name}"
    folder = job.path(name)
    hub = Hub(job.env)
    cached = folder if folder.is_dir() else hub.cached("model", name)
    if cached is not None and (cached / "config.json").is_file():
        plan.shapes[name] = json.loads((cached / "config.json").read_text(encoding="utf-8"))

    if folder.is_dir():
        found = f"a folder with{'' if name in plan.shapes else 'out'} config.json"
        yield expect(title, name in plan.shapes, found, "name a folder that save_pretrained wrote")
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
    job = plan.job(DATA)
    if job is None:
        return
    source = job.config.data.source
    title = f"data set {source}"
    name = _ON_HUB.get(source, source.removeprefix("math:"))
    path = job.path(name)
    is_file = path.suffix in (".jsonl", ".json", ".csv", ".parquet")
    is_repository = "/" in name and _REPOSITORY.fullmatch(name) and not is_file

    if source == "tiny":
        yield Result(title, "ok", "generated on the spot")
    elif source not in _ON_HUB and path.exists():
        yield Result(title, "ok", "here in files")
    elif not is_repository:
        fix = "correct data.source: a file, a folder, or org/name on the hub"
        yield Result(title, "fail", f"there is no {path}", fix)
    else:
        hub = Hub(job.env)
        result, response = hub.look_up(title, f"api/datasets/{name}", hub.cached("dataset", name))
        if response is not None and response.json().get("gated") and not hub.token:
            result = Result(title, "fail", "gated, and there is no HF_TOKEN", _NO_ACCESS)
        yield result


def check_clock(plan: Plan) -> Iterator[Result]:
    """Compares our clock with the hub's, or with that of the package index."""
    hub = Hub(os.environ)
    for url in [] if hub.offline else [hub.endpoint, "https://pypi.org/simple/"]:
        with suppress(httpx.HTTPError, httpx.InvalidURL):
            sent = time.time()
            response = httpx.head(url, timeout=_TIMEOUT_S / 2)
            yield compare_clocks(f"clock of {httpx.URL(url).host}", response, sent)
            return
    yield Result("clock", "ok", "not compared: neither the hub nor the package index answers")
