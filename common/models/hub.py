"""Checks that a model exists before anything loads it, without waiting long for a hub that does not
answer; and that its files were whole.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common import Json
from common.errors import ConfigError
from common.process.daemon_threads import in_daemon_thread

if TYPE_CHECKING:
    from common.settings.config import Config

REACH_S = 4.0
"""Seconds to wait for the hub's answer. Its own libraries try for 24 s or longer."""
_POLL_S = 0.5
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ELSEWHERE = (
    "or name a local model directory (`rlhf tiny-model DIRECTORY` makes the built-in model)"
)
_NOT_CAUSAL = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
"""Ends of the names of architectures that have another head."""
_T = TypeVar("_T")

BUILDING = threading.RLock()
"""Held while a model is built or loaded. transformers and this package then replace methods of
torch's and transformers' classes: two threads at once would put each other's replacements back for
good.
"""


def check_models(config: "Config") -> None:
    """Raises ConfigError unless every model that a trainer with these settings loads can be
    found.
    """
    critic = config.critic.model if config.algorithm.needs_critic else ""
    for field, name in (
        ("model.name", config.model.name),
        ("model.reference", config.model.reference),
        ("critic.model", critic),
    ):
        if name:
            check_model(name, field)


def check_model(
    name: str,
    field: str = "model.name",
    *,
    needs_weights: bool = False,
    is_policy: bool = False,
) -> None:
    """Raises ConfigError, naming `field`, unless `name` is a model directory, or a model in the
    hub's cache or on the hub.

    `needs_weights`: a directory also has to have the files of the weights, and if it is an adapter,
    the directory of its model has to exist. `is_policy`: it also has to have those of a tokenizer,
    and must not be a model that cannot write text.
    """
    path = Path(name)
    if path.is_dir():
        if not _has(path, "config.json", "adapter_config.json"):
            raise _not_found(
                "the directory has no config.json, so it holds no model",
                field=field,
                name=name,
                remedy="name another,",
            )
        _refuse_two_models(path, field)
        file = path / "config.json"
        try:
            content = json.loads(file.read_bytes() if file.is_file() else b"{}")
        except ValueError as error:
            raise _not_found(
                f"its config.json is not JSON: {error}",
                field=field,
                name=name,
                remedy="restore that file,",
            ) from None
        if "trainer" in content and "model_type" not in content:
            newest = max(path.glob("checkpoints/step_*"), default=None)
            raise _not_found(
                "this is the directory of a run, not of a model",
                field=field,
                name=name,
                remedy=f"name its newest checkpoint, {newest}," if newest else "name another,",
            )
        if needs_weights or is_policy:
            _check_weights(path, field)
        if is_policy:
            check_tokenizer(path, field)
            check_causal(name, field)
        return

    remedy = "correct the path, name a model of the hub as org/name,"
    if path.exists():
        problem = "this is a file, not a model directory"
        raise _not_found(problem, field=field, name=name, remedy=remedy)
    if not _REPOSITORY.fullmatch(name):
        problem = "there is no such directory"
        raise _not_found(problem, field=field, name=name, remedy=remedy)

    _check_hub(name, field)


def _refuse_two_models(directory: Path, field: str) -> None:
    """Raises ConfigError for a directory with a whole model and an adapter: transformers would load
    the adapter's base model, and an engine the whole one.
    """
    has_weights = _has(
        directory, "model*.safetensors", "language_model*.safetensors", "pytorch_model*.bin"
    )
    if has_weights and _has(directory, "adapter_config.json"):
        raise ConfigError(
            "the directory has both a whole model and an adapter",
            field=field,
            value=str(directory),
            remedy="remove the one that is old: adapter_config.json and adapter_model.safetensors, "
            "or config.json and the model's weights",
        )


def _check_weights(directory: Path, field: str) -> None:
    """Raises ConfigError for a model directory without weights, or an adapter without its model."""
    if not _has(directory, "*.safetensors", "*.bin"):
        raise _not_found(
            "the directory has no weights (*.safetensors or *.bin)",
            field=field,
            name=str(directory),
            remedy="copy them there, name another,",
        )
    adapter = directory / "adapter_config.json"
    if not adapter.is_file():
        return
    with suppress(ValueError):  # whoever loads the adapter reports the error
        base = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
        if isinstance(base, str) and not _REPOSITORY.fullmatch(base) and not Path(base).is_dir():
            raise ConfigError(
                f"this is an adapter of the model {base}, which is not there",
                field=field,
                value=str(directory),
                remedy="restore that model, or correct base_model_name_or_path in "
                "adapter_config.json",
            )


def _has(directory: Path, *patterns: str) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in patterns)


def check_tokenizer(directory: Path, field: str = "model.name") -> None:
    """Raises ConfigError for a directory without a tokenizer, for which transformers would make an
    empty one. An adapter may have that of its model.
    """
    files = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "adapter_config.json")
    if not _has(directory, *files):
        raise no_tokenizer(str(directory), field)


def no_tokenizer(name: str, field: str = "model.name") -> ConfigError:
    """Returns the error for a model without a tokenizer."""
    return _not_found(
        "the model has no tokenizer (tokenizer.json and tokenizer_config.json)",
        field=field,
        name=name,
        remedy="copy its files there, name another,",
    )


def check_causal(name: str, field: str = "model.name") -> None:
    """Raises ConfigError for a model that does not write text from left to right, such as BERT."""
    config = text_config(name)
    architecture = next(iter(config.get("architectures") or [""]))
    if architecture.endswith(_NOT_CAUSAL) or config.get("is_encoder_decoder"):
        raise _not_found(
            f"this is not a causal language model but a {architecture}",
            field=field,
            name=name,
            remedy="name one that writes text from left to right, such as Qwen/Qwen3-0.6B,",
        )


def is_path(name: str) -> bool:
    """Whether a model's name can only be that of a directory on this machine."""
    return Path(name).exists() or not _REPOSITORY.fullmatch(name)


def _check_hub(name: str, field: str) -> None:
    """Raises ConfigError unless a model is in the hub's cache or on the hub."""
    import huggingface_hub as hub  # slow to import
    from huggingface_hub import errors

    if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    neither = "there is no such directory here, and"
    if hub.constants.HF_HUB_OFFLINE:
        problem = (
            f"{neither} the hub's cache does not have the model, while HF_HUB_OFFLINE switches "
            "the hub off"
        )
        raise _not_found(problem, field=field, name=name, remedy="unset it,")

    address = hub.hf_hub_url(name, "config.json")
    try:
        patiently(lambda: hub.get_hf_file_metadata(address, timeout=REACH_S), REACH_S)
    except errors.GatedRepoError:
        problem = "the model is gated"
        remedy = "ask for access on its page and set HF_TOKEN,"
    except errors.RepositoryNotFoundError:
        problem = f"{neither} the hub has no model of this name that you can access"
        remedy = "correct the name, set HF_TOKEN,"
    except errors.EntryNotFoundError:
        problem = "the repository on the hub has no config.json, so it holds no model"
        remedy = "name another,"
    except Exception as error:  # the library raises many types when the network fails
        cause = " ".join(str(error).split()) or type(error).__name__
        problem = f"{neither} the hub cannot be reached: {cause}"
        remedy = "check the network, HTTPS_PROXY and HF_ENDPOINT,"
    else:
        return
    raise _not_found(problem, field=field, name=name, remedy=remedy)


def text_config(name: str, ask_hub: bool = False) -> Json:
    """Returns the `config.json` of a model directory or of a model in the hub's cache; its
    `text_config` if it has one.

    Returns {} when there is none. `ask_hub` first downloads it into the cache, if the hub answers.
    """
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        import huggingface_hub as hub  # slow to import

        if ask_hub:
            with suppress(Exception):  # whoever loads the model reports the error
                patiently(lambda: hub.hf_hub_download(name, "config.json"), REACH_S)
        if _REPOSITORY.fullmatch(name):
            cached = hub.try_to_load_from_cache(name, "config.json")
            path = Path(cached) if isinstance(cached, str) else path
    try:
        found = json.loads(path.read_bytes())
        text = found.get("text_config", found)
    except (OSError, ValueError, AttributeError):
        return {}
    return text if isinstance(text, dict) else {}


def stored_bytes(name: str) -> int:
    """Returns the bytes of the weights in the files of a model directory or of a model on the hub;
    0 when they are not there, or the hub does not answer.
    """
    if Path(name).is_dir():
        return sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    import huggingface_hub as hub  # slow to import

    with suppress(Exception):  # whoever loads the model reports the error
        ask = partial(hub.HfApi().model_info, name, files_metadata=True, timeout=REACH_S)
        files = patiently(ask, REACH_S).siblings or []
        return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
    return 0


def _not_found(problem: str, *, field: str, name: str, remedy: str) -> ConfigError:
    return ConfigError(problem, field=field, value=name, remedy=f"{remedy} {_ELSEWHERE}")


def patiently(
    work: Callable[[], _T], limit_s: float, progress: Callable[[], int] = lambda: 0
) -> _T:
    """Returns or raises what `work` does. Raises TimeoutError when `progress` has not changed for
    `limit_s` seconds.

    The work runs in a daemon thread, which is then abandoned: the library's own timeout applies to
    each of its many attempts and does not cover name resolution.
    """
    import huggingface_hub

    future = in_daemon_thread(work, "hub")
    since = time.monotonic()
    seen = -1
    while not wait([future], min(_POLL_S, limit_s)).done:
        done = progress()
        if done != seen:
            since = time.monotonic()
            seen = done
        if time.monotonic() - since >= limit_s:
            raise TimeoutError(
                f"{huggingface_hub.constants.ENDPOINT} did not answer for {limit_s:.0f} s"
            )
    return future.result()


def refuse_random(missing: Collection[str]) -> None:
    """Raises ValueError when the files of a model lack tensors, which transformers would fill with
    random numbers: the model would then answer, and its answers would mean nothing.
    """
    if missing:
        count = "a tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise ValueError(
            f"its files lack {count} of the model, which would be random: {min(missing)}"
        )
