"""Arguments of scripts as TRL reads them: `TrlParser`, `ScriptArguments`, `ModelConfig`, and
`DatasetMixtureConfig` with `get_dataset`.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from common import Json
from common.errors import ConfigError, did_you_mean
from common.settings.sources import read_yaml, yaml_problem
from trainer.api.refusals import Refusals
from trainer.api.settings import TrainerConfig
from trainer.api.trl import ARGUMENTS, RENAMED


@dataclass
class ScriptArguments:
    """The data of a script."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    gradient_checkpointing_use_reentrant: bool = False


@dataclass
class DatasetConfig:
    """One data set of a mixture, with the arguments of `datasets.load_dataset`."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None
    """Its share of the mixture."""


@dataclass
class DatasetMixtureConfig:
    """The data sets of a script that mixes several."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Returns the data sets one after the other, as a DatasetDict with a split `train`, and `test`
    if `test_split_size` is set. With fractions, each has as many of its first rows as its share
    needs. Raises ConfigError for a mixture of nothing, and for fractions that cannot be kept.
    """
    shares = _shares(mixture_config)
    from datasets import DatasetDict, concatenate_datasets, load_dataset

    parts = []
    for each in mixture_config.datasets:
        part = load_dataset(
            each.path,
            each.name,
            data_dir=each.data_dir,
            data_files=each.data_files,
            split=each.split,
            streaming=mixture_config.streaming,
        )
        parts.append(part if each.columns is None else part.select_columns(each.columns))
    if shares:
        # The largest mixture in which no data set has too few rows.
        pairs = list(zip(parts, shares, strict=True))
        rows = min(len(part) / share for part, share in pairs if share)
        parts = [part.select(range(round(share * rows))) for part, share in pairs]

    mixture = concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": mixture})
    return mixture.train_test_split(test_size=mixture_config.test_split_size)


def _shares(mixture_config: DatasetMixtureConfig) -> list[float]:
    """Returns the fractions, which then sum to 1; empty without any. Raises ConfigError."""
    fractions = [each.fraction for each in mixture_config.datasets]
    given = [fraction for fraction in fractions if fraction is not None]
    problem = ""
    remedy = "give every data set a fraction above 0, or none of them"
    if not fractions:
        problem = "there is no data set"
        remedy = "list at least one"
    elif given and (len(given) < len(fractions) or min(given) <= 0):
        problem = "these fractions make no mixture"
    elif given and mixture_config.streaming:
        problem = "the rows of a stream are not known, so it has no fraction"
        remedy = "leave streaming or the fractions out"
    if problem:
        raise ConfigError(problem, field="datasets", value=fractions, remedy=remedy)
    return [fraction / sum(given) for fraction in given]


@dataclass
class ModelConfig:
    """The model of a script, and its LoRA adapter. The trainer decides types and attention itself.

    Raises ConfigError for quantisation.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    torch_dtype: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | str | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit"):
            if getattr(self, name):
                raise ConfigError(
                    "quantised weights cannot be trained: the trainer keeps them in float32",
                    field=name,
                    value=True,
                    remedy="leave it out; use_peft trains an adapter, which needs less memory",
                )


def get_peft_config(model_args: ModelConfig) -> Any:
    """Returns the LoraConfig of a script; None unless `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> None:
    """Returns None: there is no quantisation, which `ModelConfig` refuses."""


def get_kbit_device_map() -> None:
    """Returns None: there is no quantisation, which `ModelConfig` refuses."""


class TrlParser:
    """Reads the arguments of a script, `--name value`, and those of a YAML file, `--config FILE`.

    Args:
        kinds: dataclasses and classes of settings, such as GRPOConfig, one of which reads each
            argument.
    """

    def __init__(self, kinds: Any = (), **_: Any) -> None:
        self._kinds: list[Any] = list(kinds) if isinstance(kinds, list | tuple) else [kinds]

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Returns an object of each class, and last the names that none of them reads, if
        `return_remaining_strings`. Raises ConfigError for such names otherwise, and for a wrong
        value.
        """
        given = _given(sys.argv[1:] if args is None else args)
        made = []
        known: set[str] = set()
        refusals = Refusals()
        of_dataclasses = set[str]()
        for kind in self._kinds:
            if not issubclass(kind, TrainerConfig):
                of_dataclasses |= _names(kind)
        for kind in self._kinds:
            names = _names(kind)
            if issubclass(kind, TrainerConfig):
                # As TRL's configs, which have no such argument: a script loads the model itself.
                names -= {"model_name_or_path"} & of_dataclasses
            known |= names
            own = {name: value for name, value in given.items() if name in names}
            for name in _lists(kind) & own.keys():
                if not isinstance(own[name], list):
                    own[name] = [own[name]]
            with refusals.collected():
                made.append(_made(kind, own, refusals))
        unknown = [name for name in given if name not in known]
        if fail_with_unknown_args and not return_remaining_strings:
            for name in unknown:
                error = ConfigError(
                    "there is no such argument",
                    field=f"--{name}",
                    value=given[name],
                    remedy=did_you_mean(name, [], known) or "leave it out",
                )
                refusals.add(error)
        refusals.raise_all()
        if return_remaining_strings:
            made.append([f"--{name}" for name in unknown])
        return tuple(made)

    parse_args_into_dataclasses = parse_args_and_config


def _made(kind: Any, own: Json, refusals: Refusals) -> Any:
    """Returns an object with these arguments; None, with what is wrong in `refusals`, if they do
    not fit a dataclass. Raises ConfigError if they do not fit a config.
    """
    if issubclass(kind, TrainerConfig):
        return kind(**own)
    try:
        return TypeAdapter(kind).validate_python(own) if own else kind()
    except ValidationError as error:
        for problem in error.errors():
            wrong = ConfigError(
                problem["msg"],
                field=f"--{problem['loc'][0]}" if problem["loc"] else None,
                value=problem["input"],
                remedy="give a value of that type",
            )
            refusals.add(wrong)
        return None


def _names(kind: Any) -> set[str]:
    if issubclass(kind, TrainerConfig):  # also as a dataclass of a script
        return {*kind.model_fields, *ARGUMENTS, *RENAMED}
    assert is_dataclass(kind), kind
    return {field.name for field in fields(kind)}


def _lists(kind: Any) -> set[str]:
    """Returns the names of the arguments that take only a list."""
    found = set()
    for name, type_ in get_type_hints(kind).items():
        types = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
        if str not in types and any(get_origin(each) is list for each in types):
            found.add(name)
    return found


def _given(words: Sequence[str]) -> Json:
    """Returns the arguments of a command line, which override those of its YAML file."""
    given: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if found := re.fullmatch(r"--([a-z]\w*(?:-\w+)*)(?:=(.*))?", word):
            name = found[1].replace("-", "_")
            given[name] = [] if found[2] is None else [read_yaml(found[2])]
        elif name:
            given[name].append(read_yaml(word))
        else:
            raise ConfigError(
                "this is not an argument",
                field="arguments",
                value=word,
                remedy="write --name value",
            )

    values = {name: _value(words_of) for name, words_of in given.items()}
    path = values.pop("config", None)
    if path is None:
        return values
    return {**_of_file(Path(path)), **values}


def _of_file(path: Path) -> Json:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"the file cannot be read: {yaml_problem(error)}"
    else:
        if isinstance(content, dict):
            return content
        problem = "the file is not a mapping of arguments"
    raise ConfigError(
        problem, field="--config", value=str(path), remedy="write one argument a line, name: value"
    )


def _value(values: list[Any]) -> Any:
    """Returns the value of an argument: True for a flag alone, a list for several words."""
    if not values:
        return True
    return values[0] if len(values) == 1 else values
