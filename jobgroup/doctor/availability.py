"""Availability of models and data sets: in a folder, the hub's cache or on the hub.

Asks as the tasks do when they start (`common/models/hub.py`, `services/data/hub.py`).
"""

from collections.abc import Iterator

from common.errors import ConfigError, shorten
from common.models import hub
from common.process.topology import DATA, ENVIRONMENT, REWARD, ROLLOUT, TRAINER
from common.settings.rewards import ModelReward
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, Results, failed
from services.data.hub import is_hub_name

# As in services/data/loaders_math.py, whose import takes seconds and fails in a light environment.
_ON_HUB = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}


def models(plan: Plan) -> dict[str, PlannedTask]:
    """Returns the models that tasks on this machine load, each with one of these tasks. The
    environment-server loads only a model's tokenizer.
    """
    found: dict[str, PlannedTask] = {}
    for job in plan.here:
        for name in _models_of(job):
            if name:
                found.setdefault(name, job)
    return found


def _models_of(job: PlannedTask) -> Iterator[str]:
    config = job.config
    if job.name in (TRAINER, ROLLOUT, ENVIRONMENT):
        yield config.model.name
    if job.name == TRAINER:
        # Where they are not read, settings that name them are refused.
        yield config.model.reference
        yield config.critic.model
    reward_model = config.reward.function(ModelReward)
    if job.name == REWARD and reward_model is not None:
        yield reward_model.model


def check_model(plan: Plan, name: str, job: PlannedTask) -> Results:
    """Looks for the model, and puts the content of its config.json into the plan's shapes."""
    title = f"model {name}"
    folder = job.path(name)
    place = str(folder) if folder.exists() else name
    try:
        hub.check_model(place)
    except ConfigError as error:
        if plan.makes_model(job):
            yield Result(title, "ok", "not there yet; make demo, or the task's setup, makes it")
        else:
            yield failed(title, error)
        return
    config = hub.text_config(place, ask_hub=True)
    if config:
        plan.shapes[name] = config
    yield Result(title, "ok", "a folder" if folder.is_dir() else "on the hub, or in its cache")


def check_dataset(plan: Plan) -> Results:
    """Looks for the prompts."""
    job = plan.job(DATA)
    if job is None:
        return
    source = job.config.data.source
    title = f"data set {source}"
    name = _ON_HUB.get(source, source.removeprefix("math:"))
    if source == "tiny":
        yield Result(title, "ok", "generated on the spot")
    elif source not in _ON_HUB and job.path(name).exists():
        yield Result(title, "ok", "here in files")
    elif is_hub_name(name):
        yield _on_hub(title, name)
    else:
        yield Result(
            title,
            "fail",
            f"there is no {job.path(name)}",
            "correct data.source: a file, a folder, or org/name on the hub",
        )


def _on_hub(title: str, name: str) -> Result:
    # Slow to import; another check may be importing it at this moment.
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            snapshot_download(name, repo_type="dataset", local_files_only=True)
            return Result(title, "ok", "in the hub's cache")
        api = HfApi()
        hub.patiently(lambda: api.auth_check(name, repo_type="dataset"), hub.REACH_S)
    except Exception as error:  # the library raises many types when the network fails
        cause = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 400)
        return Result(
            title,
            "fail",
            cause,
            "check the name, HF_TOKEN, HTTPS_PROXY and HF_ENDPOINT; with a cached copy set "
            "HF_HUB_OFFLINE=1 and HF_HOME; or name a folder with files",
        )
    return Result(title, "ok", f"on {api.endpoint}")
