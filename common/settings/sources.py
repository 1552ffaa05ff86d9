"""Reads settings from a file, the environment and the command line as nested mappings, not yet
validated.
"""

import difflib
import json
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from common import Json
from common.errors import ConfigError

PREFIX = "RLHF_"
_FORM = "write --section.name VALUE; --help lists the settings that matter most"
SHORT_NAMES = {
    "MODEL_NAME": ("model", "name"),
    "NUM_EPOCHS": ("trainer", "num_epochs"),
    "BATCH_SIZE": ("trainer", "batch_size"),
    "MAX_STEPS": ("trainer", "max_steps"),
    "SEED": ("seed",),
    "STATE_DIR": ("state_dir",),
    "RUN_DIR": ("trainer", "run_dir"),
}


def packaged(path: Path, folder: str = ".") -> Path:
    """Returns `path` if it is a file, else that file of the installed package (in its root or
    `folder`) if it exists.

    So `jobgroup/configs/tiny-cpu.yaml` is found even when the working directory is not a checkout.
    """
    # The folder of the packages: a checkout, or site-packages of an installed wheel.
    root = Path(__file__).resolve().parents[2]
    return next(
        (each for each in (path, root / path, root / folder / path) if each.is_file()), path
    )


def variable(setting: str) -> str:
    """Returns the environment variable of a setting."""
    return f"{PREFIX}{setting}".replace(".", "__").upper()


def take_config_option(argv: list[str]) -> tuple[str | None, list[str]]:
    """Returns the file named by `--config`, and the other arguments."""
    # argparse knows `--config FILE` and `--config=FILE`. The rest has names such as
    # `--section.field`, of which it must neither complete one nor end the program for one.
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, rest = parser.parse_known_args(argv)
    except ArgumentError:
        raise ConfigError(
            "--config needs the name of a file", field="--config", remedy="write --config FILE"
        ) from None
    return known.config, rest


def from_words(words: Iterable[str], known: Mapping[str, FieldInfo]) -> Json:
    """Reads `--section.field VALUE` and `--section.field=VALUE`. A list or mapping may be
    continued by naming the setting again. Raises ConfigError.
    """
    content = Json()
    earlier = Json()
    given = iter(words)
    for word in given:
        option, equals, text = word.partition("=")
        name = option.removeprefix("--")
        if not word.startswith("--"):
            raise ConfigError("this is not an option", field=word, remedy=_FORM)
        if not equals:  # the next word is the value; a missing one looks like an option
            text = next(given, "--")
        if name not in known:
            raise unknown(known, name, option, None if text == "--" else text)
        if not equals and text.startswith("--"):
            raise ConfigError("it has no value", field=option, remedy=_FORM)

        value = read_text(known[name], text, option)
        # Only what the command line said before goes on: a list in a file is replaced.
        before = earlier.get(name)
        if isinstance(value, list) and isinstance(before, list):
            value = before + value
        if isinstance(value, dict) and isinstance(before, dict):
            value = before | value
        earlier[name] = value
        put(content, tuple(name.split(".")), value)
    return content


def read_text(field: FieldInfo, text: str, name: str) -> Any:
    """Returns the value of a setting written as text: a list as JSON or with commas, a mapping as
    JSON or with commas as NAME=VALUE, anything else as it stands for the setting itself to read.

    Raises ConfigError for text that begins like a list or mapping but is none.
    """
    if field.annotation is str:  # "None" and "[a]" are texts too
        return text
    if text in ("None", "null"):
        return None
    # Only these begin JSON. Any other text may be a name that YAML would read as a number or date.
    if text.startswith(("[", "{")):
        try:
            read = read_yaml(text)
            with suppress(ValueError):  # in JSON 1e-9 is a number, in YAML a text
                read = json.loads(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{name} is not a list or mapping: {yaml_problem(error)}",
                field=name,
                value=text,
                remedy="write it as JSON",
            ) from None
        # A mapping alone is a list of one: `--reward.functions '{"name": "judge"}'`.
        return [read] if is_list(field) and not isinstance(read, list) else read
    kind = get_origin(field.annotation)
    if is_list(field) or kind is tuple:
        # Without text `split` would give a list with an empty entry.
        return [part.strip() for part in text.split(",")] if text else []
    if kind is dict and "=" in text:
        return dict(part.partition("=")[::2] for part in text.split(","))
    return text


def is_list(field: FieldInfo) -> bool:
    """Returns whether a setting is a list."""
    return any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))


def holds_several(field: FieldInfo) -> bool:
    """Returns whether a setting is a list, a tuple or a mapping."""
    return is_list(field) or get_origin(field.annotation) in (tuple, dict)


class _UniqueKeys(yaml.SafeLoader):
    """A loader that refuses a key that stands twice in a mapping: YAML drops the first silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen and key.tag != _MERGE:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} stands twice in one mapping; merge the two",
                    problem_mark=key.start_mark,
                )
            seen.add(name)
        return node


# The tag of `<<`, of which a mapping may have several.
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str) -> Any:
    """Returns the content of a YAML text. Raises YAMLError, also for a key that stands twice, and
    ValueError for an impossible date.
    """
    return yaml.load(text, _UniqueKeys)  # noqa: S506 - a SafeLoader


def read_yaml_documents(text: str) -> list[Any]:
    """Returns the content of every document of a YAML text. Raises like `read_yaml`."""
    return list(yaml.load_all(text, _UniqueKeys))


def yaml_problem(error: Exception) -> str:
    """Returns one line that says why a YAML file cannot be read."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error.strerror if isinstance(error, OSError) else " ".join(str(error).split()))


def from_file(path: Path) -> Json:
    """Reads a YAML file of settings by section. Raises ConfigError."""
    try:
        content = read_yaml(packaged(path).read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        # ValueError: an impossible date.
        reason = yaml_problem(error)
        raise ConfigError(
            f"the configuration file cannot be read: {reason}",
            field="--config",
            value=str(path),
            remedy="name a YAML file with settings by section, like those in jobgroup/configs",
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(
            "the configuration file is not a mapping of sections",
            field="--config",
            value=str(path),
            remedy="write sections with settings, such as `trainer: {max_steps: 10}`",
        )
    return content


def from_env(env: Mapping[str, str], known: Mapping[str, FieldInfo]) -> Json:
    """Reads `RLHF_SECTION__FIELD` and the short names. Raises ConfigError for a name that is not
    among `known`.
    """
    content = Json()
    for name, keys in SHORT_NAMES.items():
        # An empty variable counts as unset, as with a shell's `${NAME:-}`.
        if env.get(name):
            put(content, keys, env[name])
    # In one order on every machine, so that of two mistakes the same one is reported.
    for name, value in sorted(env.items()):
        if name.startswith(PREFIX):
            setting = name.removeprefix(PREFIX).lower().replace("__", ".")
            if setting not in known:
                if any(name.startswith(f"{setting}.") for name in known):
                    raise ConfigError(
                        f"{setting} is a section, not a setting",
                        field=name,
                        remedy="write RLHF_SECTION__FIELD",
                    )
                raise unknown(known, setting, name)
            put(content, tuple(setting.split(".")), read_text(known[setting], value, name))
    return content


def put(content: Json, keys: tuple[str, ...], value: object) -> None:
    """Sets a value of a nested mapping."""
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


def merge(low: Json, high: Mapping[str, Any]) -> Json:
    """Merges two nested mappings; values of `high` replace those of `low`."""
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def near(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known settings that a misspelt name may mean: the name of the section that it is,
    the nearest one, or those of any section with the nearest last word.
    """
    leaves = {setting: setting.rpartition(".")[2] for setting in known}
    if f"{name}.name" in leaves:  # `--model DIR`, as other commands have it
        return [f"{name}.name"]
    found = difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    if found:
        return found
    meant = name.rpartition(".")[2]
    # `trainer.learning_rate` means `optimizer.learning_rate`: the section alone was wrong.
    leaf = difflib.get_close_matches(meant, leaves.values(), n=1, cutoff=0.8)
    return [setting for setting in leaves if leaves[setting] in leaf]


def unknown(known: Iterable[str], name: str, field: str, value: object = None) -> ConfigError:
    """Returns the error for a setting that does not exist. `field` is the name as the user wrote
    it.
    """
    name = name.replace("-", "_") or '""'
    likely = near(name, known)
    # The remedy has the spelling that was used: a variable, an option, or a key of a file.
    if field.startswith(PREFIX):
        written = [variable(setting) for setting in likely]
    else:
        dashes = "--" if field.startswith("--") else ""
        written = [f"{dashes}{setting}" for setting in likely]
    hint = f"did you mean {' or '.join(written)}? " if likely else ""
    return ConfigError(
        f"there is no setting {name}",
        field=field or name,
        value=value,
        remedy=f"{hint}`python -m trainer --help-all` lists every one",
    )
