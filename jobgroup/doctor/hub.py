"""Models and data sets: in a folder, in the cache, or on the hub; tokens; and the hub's clock."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from common.topology import CRITIC, DATA, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor import clock
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.result import Result, fail, ok, warn

TIMEOUT_S = 5.0
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ON_HUB = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""As in services/data/loaders_math.py, which is not imported: that takes seconds, and a light environment lacks it."""
_TRUE = {"1", "on", "yes", "true"}
_NO_ACCESS = (
    "ask for access on its page and give HF_TOKEN (--secret HF_TOKEN); without one the hub answers the same for a wrong name"
)
_MAKE_TINY = "trainer.tiny_model"


class Hub:
    """The hub as the processes of a task reach it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()
        self.cache = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
        self.endpoint = (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.shown = re.sub(r"//[^@/]*@", "//", self.endpoint)  # it can have a password in it
        self.offline = any(env.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        path = Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser()
        self.token = env.get("HF_TOKEN") or (path.read_text().strip() if os.access(path, os.R_OK) and path.is_file() else "")

    def cached(self, kind: str, name: str) -> Path | None:
        """The newest snapshot in the cache that has files."""
        folder = self.cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
        if not os.access(folder, os.R_OK | os.X_OK):
            return None
        found = [path for path in folder.iterdir() if any(path.iterdir())]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def get(self, path: str) -> httpx.Response:
        """One request, with the token, through the proxies of the environment. Raises httpx.HTTPError."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.get(f"{self.endpoint}/{path}", headers=headers, follow_redirects=True, timeout=TIMEOUT_S)


def models(plan: Plan) -> dict[str, Job]:
    """The models that processes here load, each with a task that does."""
    found: dict[str, Job] = {}
    for job in plan.here:
        config, names = job.config, []
        if job.name in (TRAINER, ROLLOUT, CRITIC):
            names.append(config.model.name)
        if job.name == TRAINER and config.algorithm.kl_coef and config.model.reference:
            names.append(config.model.reference)
        if job.name in (TRAINER, CRITIC) and config.algorithm.needs_critic and config.critic.model:
            names.append(config.critic.model)
        if job.name == REWARD and "reward_model" in config.reward.function_names():
            names.append(config.reward.reward_model_name)
        found |= {name: job for name in names if name not in found}
    return found


def check_model(name: str, job: Job, demo: bool, shapes: dict[str, dict[str, Any]]) -> Iterable[Result]:
    """Can it be had? What its config.json says goes into `shapes`."""
    title, folder = f"model {name}", job.path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            return [fail(title, "the folder has no config.json", "name a folder as save_pretrained writes it")]
        shapes[name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return [ok(title, "a folder here")]
    if not _REPOSITORY.fullmatch(name):
        if demo or _MAKE_TINY in job.setup:
            return [ok(title, "not there yet; make demo, or the task's setup, makes it")]
        make = f"make it: .venv/bin/python -m {_MAKE_TINY} {name}; or name another with MODEL_NAME"
        return [fail(title, f"there is no folder {folder}", make)]
    hub = Hub(job.env)
    cached = hub.cached("model", name)
    if cached is not None and (cached / "config.json").is_file():
        shapes[name] = json.loads((cached / "config.json").read_text(encoding="utf-8"))
    result, response = _asked(hub, title, f"{name}/resolve/main/config.json", cached)
    if response is not None and name not in shapes:
        shapes[name] = response.json()
    return [result]


def check_dataset(job: Job) -> Iterable[Result]:
    """Can the prompts be had?"""
    data = job.config.data
    title = f"data set {data.source}"
    if data.source == "tiny":
        return [ok(title, "generated on the spot")]
    name = _ON_HUB.get(data.source, data.source.removeprefix("math:"))
    if data.source not in _ON_HUB and job.path(name).exists():
        return [ok(title, "here in files")]
    if not _REPOSITORY.fullmatch(name) or "/" not in name or job.path(name).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        return [fail(title, f"there is no {job.path(name)}", "correct data.source: a file, a folder, or org/name on the hub")]
    hub = Hub(job.env)
    result, response = _asked(hub, title, f"api/datasets/{name}", hub.cached("dataset", name))
    if response is not None and response.json().get("gated") and not hub.token:
        return [fail(title, "gated, and there is no HF_TOKEN", _NO_ACCESS)]
    return [result]


def _asked(hub: Hub, title: str, path: str, cached: Path | None) -> tuple[Result, httpx.Response | None]:
    """Whether the hub has it, and its answer if it does."""
    elsewhere = "fetch it where the hub is reachable and copy the cache (HF_HOME), or name a folder"
    if hub.offline:
        if cached is not None:
            return ok(title, f"cached in {hub.cache}; the hub is switched off (HF_HUB_OFFLINE)"), None
        return fail(title, f"not in {hub.cache}, and the hub is switched off", f"unset HF_HUB_OFFLINE, or {elsewhere}"), None
    try:
        response = hub.get(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{hub.shown} does not answer: {str(error) or type(error).__name__}"
        if cached is not None:
            return warn(title, f"cached, but {reason}", "set HF_HUB_OFFLINE=1, so that nobody waits for the hub"), None
        return fail(title, reason, f"open the way (HTTPS_PROXY), set HF_ENDPOINT to a mirror, or {elsewhere}"), None
    if response.is_success:
        return ok(title, f"{'cached, and ' if cached else ''}on {hub.shown}"), response
    told = f"{hub.shown} says {response.status_code}"
    if response.status_code in (401, 403):
        state = "with the token here" if hub.token else "and there is no HF_TOKEN"
        return fail(title, f"{told}: gated, private or not there, {state}", _NO_ACCESS), None
    if response.status_code == 404:
        return fail(title, f"{told}: no such name", "correct the name"), None
    return (warn if cached else fail)(title, told, "try again later, or another HF_ENDPOINT"), None


def check_clock(env: Mapping[str, str]) -> Iterable[Result]:
    """Our clock against the hub's, or another server's that a set-up needs."""
    hub = Hub(env)
    for url in [] if hub.offline else [hub.endpoint, "https://pypi.org/simple/"]:
        sent = time.time()
        try:
            response = httpx.head(url, timeout=TIMEOUT_S / 2)
        except (httpx.HTTPError, httpx.InvalidURL):
            continue
        if (measured := clock.offset(response, sent)) is not None:
            return [clock.judged(f"clock of {httpx.URL(url).host}", measured)]
    return [ok("clock", "not compared: neither the hub nor the package index can be asked")]


def check_hf_token(plan: Plan) -> Iterable[Result]:
    """For gated models and data sets; whether one is needed the hub tells above."""
    jobs = [job for job in plan.here if job.name in (TRAINER, ROLLOUT, CRITIC, DATA)]
    for job in jobs[:1]:
        if Hub(job.env).token:
            yield ok("HF_TOKEN", "set")
        else:
            yield ok("HF_TOKEN", "not set; only gated or private models and data sets need it")
