"""The settings that a run must share with the checkpoint it resumes from; all others may change.

The state in a checkpoint depends on these settings, or would silently override them. Models are
compared by their content, so that a directory may move.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from transformers.utils import cached_file

from common.errors import ConfigError
from common.settings.config import Config
from learning.loading import samples
from trainer.policy.scorer import cannot_load, load_tokenizer

Identity = dict[str, list[str]]
"""For every setting, its value in messages and its value for comparison."""
LearnsFrom = Literal["rewards", "answers"]
_LEARNS_FROM = "learning from"
_TOKENIZER = "tokenizer of model.name"
"""Parts of the identity that are not settings."""
_VOLATILE = ("transformers_version", "_name_or_path")
"""Entries of `config.json` that say nothing about the model."""
_PROMPTS = (
    "hub_config",
    "train_split",
    "num_samples",
    "prompt_field",
    "answer_field",
    "messages_field",
    "map",
    "levels",
    "subjects",
    "curriculum",
)
"""Settings that determine the prompts and their order, in which a run has a position."""
_PROBE = "Compute 12.5 + 30 = ?\n\n\tdef f(x): return x**2  # naïve café — 東京 🙂"


def identity(config: Config, learns_from: LearnsFrom = "rewards") -> Identity:
    """Returns the settings that all attempts of this run must share. Raises ConfigError for an
    unreadable model.
    """
    algorithm = config.algorithm
    model = config.model
    plain: dict[str, object] = {
        "seed": config.seed,
        "sampling.group_size": config.sampling.group_size,
        "trainer.batch_size": config.trainer.batch_size,
        "replay.reuse_ratio": config.replay.reuse_ratio,
        "lora.rank": config.lora.rank,
        "lora.alpha": config.lora.alpha,
        "lora.target_modules": sorted(config.lora.target_modules),
    }
    models: dict[str, str] = {}
    if algorithm.needs_critic:
        models["critic.model"] = config.critic.model
    if algorithm.kl_coef > 0:
        models["model.reference"] = model.reference
        plain["algorithm.reference_refresh"] = "on" if algorithm.reference_refresh else "0"
    # Otherwise the setting itself counts, and may change.
    if algorithm.kl_target is not None:
        plain["algorithm.kl_coef"] = algorithm.kl_coef  # it has been adapted since
    for name in _PROMPTS:
        plain[f"data.{name}"] = getattr(config.data, name)
    plain[_LEARNS_FROM] = learns_from

    # The advantage may change, but not whether there is a critic; likewise the teacher.
    critic = "critic" if algorithm.needs_critic else "no critic"
    teacher = "a teacher" if config.teacher.url else "no teacher"
    facts = {name: [str(value), str(value)] for name, value in plain.items()}
    facts["algorithm.advantage"] = [algorithm.advantage, critic]
    facts["teacher.url"] = [config.teacher.url, teacher]
    facts["data.source"] = [config.data.source, _data(config.data.source)]
    facts[_TOKENIZER] = [model.name, _tokenizer(load_tokenizer(model))]
    facts["model.name"] = _model(model.name)
    for name, other in models.items():
        facts[name] = _model(other) if other else ["", ""]
    return facts


def check_same(before: Identity, now: Identity, checkpoint: Path) -> None:
    """Raises ConfigError when the checkpoint belongs to another run."""
    for name in sorted(before.keys() & now.keys(), key=list(now).index):
        was, content_before = before[name]
        is_now, content_now = now[name]
        if content_before != content_now:
            raise _differs(name, was, is_now, checkpoint)


def _differs(name: str, was: str, is_now: str, checkpoint: Path) -> ConfigError:
    if name == _LEARNS_FROM:
        maker = "rlhf sft" if was == "answers" else "the trainer"
        return ConfigError(
            f"the checkpoint {checkpoint} was made by {maker}",
            field="trainer.run_dir",
            value=str(checkpoint.parent.parent),
            remedy="name another run directory",
        )
    message = (
        f"the checkpoint {checkpoint} belongs to a run with {name} {was or 'unset'}, "
        f"this run has {is_now or 'none'}"
    )
    remedy = f"set it to {was or 'nothing'} again"
    if was == is_now:
        what = "the tokenizer of model.name, or its chat template," if name == _TOKENIZER else name
        message = f"the content of {what} ({was}) has changed since {checkpoint}"
        remedy = "restore it"
    return ConfigError(
        message,
        field="model.name" if name == _TOKENIZER else name,
        value=is_now,
        remedy=f"{remedy}, or start over: another run directory, or checkpoint.resume false",
    )


def _model(name: str) -> list[str]:
    """Identifies a model: a directory by its content, a hub model by its name and configuration."""
    digest = hashlib.sha256()
    directory = Path(name)
    shown = name
    try:
        if not directory.is_dir():
            digest.update(name.encode())
            directory = Path(cached_file(name, "config.json")).parent
            shown = f"{name} ({directory.name[:12]})"  # the revision
        content = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise cannot_load("model", name, error) from None
    identifying = {key: content[key] for key in sorted(content) if key not in _VOLATILE}
    digest.update(json.dumps(identifying).encode())
    if shown == name:
        for file in sorted(directory.glob("*.safetensors")):
            for part in samples(file):
                digest.update(part)
    return [shown, digest.hexdigest()]


def _data(source: str) -> str:
    """Identifies a data set: a file by its content, any other source by its name."""
    if not Path(source).is_file():
        return source
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    """Identifies a tokenizer by its vocabulary, its chat template, the tokens of a probe text, and
    how it puts its tokens together, of which a probe shows only a part.
    """
    facts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        tokenizer.eos_token_id,
        tokenizer(_PROBE).input_ids,
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model = json.loads(backend.to_str())["model"]
        vocabulary = model.get("vocab")
        scores = vocabulary if isinstance(vocabulary, list) else None  # of a unigram model
        facts += [model.get("merges"), scores]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
