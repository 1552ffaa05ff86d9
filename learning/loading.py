"""Loads models from the hub, a directory or a checkpoint; no rank ever holds a whole sharded model.

A model is built on the meta device, sharded if it is to be, and given memory; then every rank reads
its own slices of the safetensors files, or its own experts of a mixture. If other ranks do not see
the files, rank 0 reads and sends one tensor at a time. It does so too if the files' tensors differ
from the model's in another way; then transformers loads them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from common.errors import ConfigError
from common.models.hub import BUILDING, refuse_random
from common.process import progress
from common.settings.config import Config
from common.weights.checksums import Hasher
from learning.hub_names import (
    LANGUAGE_PART,
    Sources,
    from_hub,
    hub_shapes,
    set_conversions,
    sources,
)
from learning.ranks import Ranks
from learning.sharding import local, named_tensors, prepare, region, shard
from learning.untrained_parts import Kept, language_part, processor_texts

log = logging.getLogger(__name__)
_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.py",
    "*.model",
    "*.txt",
    "*.jinja",
]
# Files that repeat the weights in the format of another library.
_OTHER_FILES = ["*/*", "consolidated*"]
# Outputs that a saved configuration may ask of every forward pass.
_UNREAD = ("output_router_logits", "output_hidden_states", "output_attentions")

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def only_logits(config: Any) -> None:
    """Switches off, in place, what a model's configuration wants computed besides logits: nobody
    here reads it.

    The router logits lead to an auxiliary loss, which fails on the engine's batches.
    """
    for part in (config, config.get_text_config()):
        for name in _UNREAD:
            if getattr(part, name, False):
                setattr(part, name, False)


def find_decoder(model: Any) -> None:
    """Lets `get_decoder` find the decoder of a model whose class misnames it (Llama 4)."""
    if model.get_decoder() is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a model, those that transformers reads: beside a
    `model.safetensors`, the index of an earlier save does not count. Empty if there are none.
    """
    whole = directory / "model.safetensors"
    if whole.exists():
        return [whole]
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    names = set(json.loads(index.read_text())["weight_map"].values())
    return [directory / Path(name).name for name in sorted(names)]  # in no other directory


Read = Callable[[str, tuple[slice, ...]], Tensor]
"""Returns the part of a tensor in a region, from files or memory."""


class SafetensorsReader:
    """Reads tensors from all safetensors files in a directory, and only the requested parts."""

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for path in weight_files(directory):
            file: Any = safe_open(path, "pt")
            self._file_of |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()
        }

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        file = self._file_of[name]
        # A scalar has no slices.
        found: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return found


class AddedModules:
    """Modules that a model gets in addition to those in its files; none by default."""

    def change(self, model: Any) -> None:
        """Adds modules to the model, whose parameters may be on the meta device."""

    def name(self, name: str) -> str:
        """Returns the name in the files of the changed model's tensor `name`."""
        return name

    def first(self, _name: str, _shape: Sequence[int]) -> Tensor | None:
        """Returns the initial value of a tensor, the same on every rank; None for one that is in
        the files.
        """
        return None


@dataclass(frozen=True)
class Pretrained:
    """A model with float32 weights of a transformers auto class, from the hub or a directory that
    every node has.

    `directory`, a checkpoint that at least rank 0 sees, replaces `name`; `configure` changes the
    model's configuration; `added` are modules that the model gets besides those in the files.
    """

    auto: Any
    name: str
    directory: Path | None = None
    trust_remote_code: bool = False
    configure: Callable[[Any], None] = lambda _: None
    added: AddedModules = field(default_factory=AddedModules)

    @property
    def source(self) -> str:
        """Name or directory of the model on this rank, or at least of its configuration."""
        return str(self.directory) if self.directory and self.directory.is_dir() else self.name

    @cached_property
    def whole_config(self) -> Any:
        """The config in the files, of which that of the model is a part if it is multimodal."""
        config = AutoConfig.from_pretrained(self.source, trust_remote_code=self.trust_remote_code)
        only_logits(config)
        self.configure(language_part(config))
        return config

    def config(self) -> Any:
        """Returns the config of the model that is loaded."""
        return language_part(self.whole_config)

    def plain(self) -> Any:
        """Loads the tensors in the files into CPU memory. Raises OSError or ValueError, also when
        the files lack a tensor that `added` does not initialise.
        """
        with BUILDING:
            model, found = self.auto.from_pretrained(
                self.source,
                config=self.config(),
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                # The model may be a part of the one in the files.
                key_mapping=None if self.config() is self.whole_config else LANGUAGE_PART,
                output_loading_info=True,
            )
        own = named_tensors(model)
        # transformers fills them with random numbers and only warns.
        refuse_random(
            [
                name
                for name in found["missing_keys"]
                if name not in own or self.added.first(name, own[name].shape) is None
            ]
        )
        return model

    def fill_added(self, model: Any) -> dict[str, Tensor]:
        """Initialises tensors missing in the files; returns this rank's shares of the others by
        their names there.
        """
        targets: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                first = self.added.first(name, tensor.shape)
                if first is None:
                    targets[self.added.name(name)] = tensor
                else:
                    local(tensor).copy_(first[region(tensor)])
        return targets

    def names(self, model: Any) -> dict[str, Tensor]:
        """Returns the model's tensors by their names without `added`, tied ones by each name."""
        tensors = model.state_dict(keep_vars=True)
        return {self.added.name(name): tensor for name, tensor in tensors.items()}

    def empty(self) -> Any:
        """Builds the modules, with parameters on the meta device and initialised buffers."""
        with BUILDING, _parameters_on_meta():
            try:
                model = self.auto.from_config(
                    self.config(), dtype=torch.float32, trust_remote_code=self.trust_remote_code
                )
            # Code of the model, which may not fit its config or need another package.
            except (AssertionError, AttributeError, ImportError, KeyError, TypeError) as error:
                raise ValueError(
                    f"transformers cannot build it: {type(error).__name__}: {error}"
                ) from error
            find_decoder(model)
            self.added.change(model)
        try:
            model.generation_config = GenerationConfig.from_pretrained(self.source)
        except OSError:
            log.info("%s has no generation config", self.source)
        return model.eval()

    def files(self, ranks: Ranks) -> Path:
        """Returns the directory of the files on this node; one process per node downloads them."""
        if self.directory or Path(self.name).is_dir():
            return self.directory or Path(self.name)
        download = partial(
            snapshot_download, self.name, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES
        )
        if ranks.local_rank == 0:
            download()
        ranks.barrier()
        return Path(download(local_files_only=True))


@contextmanager
def _damage_as_os_error() -> Iterator[None]:
    """Raises OSError for a damaged file, as for one that cannot be read."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"damaged safetensors file: {error}") from None


@progress.working()
@_damage_as_os_error()
def load(
    pretrained: Pretrained,
    wrap: Callable[[Any], nn.Module],
    ranks: Ranks,
    *,
    config: Config,
    low_precision: bool,
    trained: bool = True,
    exact: Callable[[Any], list[nn.Module]] = lambda _: [],
) -> nn.Module:
    """Returns `wrap(model)` on this rank's device, sharded or whole.

    Raises OSError or ValueError when the model cannot be loaded. See `sharding.shard` for the last
    three arguments.
    """
    # The modules, without memory for their weights.
    # Names suffice to build the model: which files' tensors become which of its own.
    directory = pretrained.files(ranks)
    names = ranks.broadcast(list(_shapes_in(directory)) if ranks.is_rank_zero else [])
    model = pretrained.empty()
    own_names = set_conversions(model, pretrained.names(model), names)
    model.kept = Kept(pretrained.whole_config, sorted(set(names) - set(own_names)))
    if ranks.is_rank_zero:
        model.kept = replace(
            model.kept,
            read=SafetensorsReader(directory).read if model.kept.names else None,
            texts=processor_texts(directory),
        )
    if ranks.broadcast(ranks.is_rank_zero and _loses_head(model, directory, own_names)):
        raise ConfigError(
            "the model's files have a head that differs from the embedding, while its config.json "
            "ties the two: transformers would keep that head, and SGLang would leave it out",
            field="model.name",
            value=pretrained.source,
            remedy="set tie_word_embeddings to false in its config.json",
        )
    root = wrap(model)

    # On this rank's device, or its share of them.
    prepare(
        model,
        config.trainer,
        trained=trained,
        device=ranks.device,
        divides_experts=ranks.expert_size > 1,
    )
    offload = config.parallel.offload_optimizer and trained and ranks.sharded
    if ranks.sharded:
        shard(
            root,
            model,
            ranks,
            low_precision=low_precision,
            offload=offload,
            trained=trained,
            gathers_once=config.parallel.reshard_after_forward is False,
            exact=exact(model),
        )
    elif low_precision:
        _keep_states_in_bfloat16(model)
    materialise(root, torch.device("cpu") if offload else ranks.device, ranks.device)
    read_weights(pretrained, model, directory, ranks)
    return root


def read_weights(pretrained: Pretrained, model: Any, directory: Path, ranks: Ranks) -> None:
    """Fills the tensors of a model from its files. A collective."""
    targets = pretrained.fill_added(model)
    # Every rank reads, if all see the same files and these have the model's tensors.
    shared = ranks.all_equal(_fingerprint(directory))
    read: Read | None = None
    if shared or ranks.is_rank_zero:
        reader = model_reader(directory, model, targets)
        read = reader.read if reader else None
    everywhere = shared and ranks.all_equal(b"" if read is None else b"fits")
    if ranks.is_rank_zero and read is None:
        log.info(
            "the files in %s do not have the model's own tensors: "
            "transformers loads the whole model on rank 0",
            directory,
        )
        read = from_memory(pretrained.plain().state_dict())
    if ranks.is_rank_zero and not everywhere and ranks.world_size > 1:
        log.info("rank 0 reads %s and sends it to the others", directory)
    fill(targets, read, ranks, everywhere)


def _loses_head(model: Any, directory: Path, own_names: Mapping[str, str]) -> bool:
    """Whether the model ties head and embedding, and its files have both, with different numbers.

    `own_names` are the model's names of the tensors in the files.
    """
    head = getattr(model.get_output_embeddings(), "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    tied = [name for name, parameter in named if parameter is head]
    in_files = [name for name, own in own_names.items() if own in tied]
    if len(in_files) < 2:
        return False
    reader = SafetensorsReader(directory)
    first, second, *_ = (reader.read(name, ()).float() for name in in_files)
    return not torch.equal(first, second)


def _keep_states_in_bfloat16(model: Any) -> None:
    """Makes embedding, norms and experts compute in bfloat16 where FSDP2 does and autocast alone
    would not.

    Embedding and norms return bfloat16; autocast would keep a copy for every product. Autocast does
    not reach grouped products, so experts get bfloat16 copies of their weights.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        has_vectors = bool(own) and all(parameter.ndim == 1 for parameter in own)
        # Attention may have vectors of its own, such as the sinks of gpt-oss, but a norm has no
        # other modules.
        is_norm = has_vectors and not list(module.children())
        if module is model.get_input_embeddings() or is_norm:
            module.register_forward_hook(lambda _module, _inputs, states: states.bfloat16())
        elif any(parameter.ndim == 3 for parameter in own):
            module.forward = partial(_with_bfloat16_weights, copy(module))


def _with_bfloat16_weights(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Calls a module with bfloat16 copies of its weights, which keep their gradients in float32."""
    weights = {
        name: parameter.bfloat16() for name, parameter in module.named_parameters(recurse=False)
    }
    return functional_call(module, weights, inputs, options)


def model_reader(
    directory: Path, model: Any, targets: Mapping[str, Tensor]
) -> SafetensorsReader | None:
    """Opens the files if they have every tensor of the model: under its own or another name, or
    that of all experts in parts, an expert each. Returns None for other files.
    """
    quantised = getattr(model.config, "quantization_config", None) is not None
    if quantised or not _shapes_in(directory):
        return None
    reader = _ModelReader(directory, model)
    shapes = reader.shapes()
    for name, target in targets.items():
        empty = torch.empty(target.shape, dtype=target.dtype, device="meta")
        found = sources(model, name, empty)
        expected = hub_shapes(model, {name: empty})
        if found is None or any(
            shapes.get(hub_name) != tuple(tensor.shape) for hub_name, tensor in expected.items()
        ):
            return None
        reader.sources[name] = found
    return reader


class _ModelReader(SafetensorsReader):
    """Reads a model's own tensors from its files, of which some are stacked from those of each
    expert; `sources` are their names there (`hub_names.sources`).
    """

    def __init__(self, directory: Path, model: Any) -> None:
        super().__init__(directory)
        self.sources: dict[str, Sources] = {}
        self._model = model

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Returns the part of a tensor in `region`, of stacked ones by reading its experts only."""
        found = self.sources[name]
        if isinstance(found, str):
            return super().read(found, region)
        parts: dict[str, Tensor] = {}
        for names in found[region[0]]:
            for each in names:
                parts[each] = super().read(each, ())
        (stacked,) = from_hub(self._model, parts).values()
        return stacked[(slice(None), *region[1:])]


def _shapes_in(directory: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in the safetensors files of `directory`; empty when there
    are none.
    """
    return SafetensorsReader(directory).shapes()


def not_in_files(model: Any, own: Mapping[str, Tensor], name: str) -> str | None:
    """Returns a tensor of the model that the files of `name` lack; None if there is none, or the
    files are not here.
    """
    try:
        directory = Path(name)
        if not directory.is_dir():
            directory = Path(snapshot_download(name, local_files_only=True))
        shapes = _shapes_in(directory)
    except OSError:  # a resumed run has its checkpoint
        return None
    if not shapes:
        return None

    for hub_name, tensor in hub_shapes(model, own).items():
        of_body = hub_name.removeprefix(f"{model.base_model_prefix}.")
        known = shapes.get(hub_name, shapes.get(of_body))
        if known is None:
            return f"{hub_name} {list(tensor.shape)}"
        if known != tuple(tensor.shape):
            return f"{hub_name} {list(tensor.shape)}, there it is {list(known)}"
    return None


def from_memory(tensors: Mapping[str, Tensor]) -> Read:
    """Returns a function that reads tensors in memory."""
    return lambda name, region: tensors[name][region]


def fill(targets: Mapping[str, Tensor], read: Read | None, ranks: Ranks, everywhere: bool) -> None:
    """Reads this rank's share of every tensor. Unless `everywhere`, rank 0 reads and sends; then
    the others have no `read`.
    """
    with torch.no_grad():
        for name, target in targets.items():
            own = local(target)
            part = region(target)
            if not everywhere and ranks.world_size > 1:
                whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
                if read is not None:
                    everything = tuple(slice(0, size) for size in target.shape)
                    whole.copy_(read(name, everything))
                dist.broadcast(whole, 0)
                own.copy_(whole[part])
            # A rank may have no share of a small tensor.
            elif read is not None and own.numel():
                own.copy_(read(name, part))
            progress.moved()


def materialise(root: nn.Module, device: torch.device, buffers: torch.device) -> None:
    """Allocates meta-device parameters on `device`, tied ones once; moves buffers to the device
    `buffers`.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(buffers)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside this context, new parameters are on the meta device. Buffers are computed, as no file
    has all of them.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def samples(file: Path) -> Iterator[bytes]:
    """Yields the header of a safetensors file and samples of its tensors, which tell versions of a
    model apart: reading a large one would take minutes.
    """
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as stream:
        header = stream.read(8)
        yield header + stream.read(min(size, int.from_bytes(header, "little")))
        first = stream.tell()
        for i in range(_SAMPLES):
            stream.seek(first + (size - first) * i // _SAMPLES)
            yield stream.read(_SAMPLE_BYTES)


def _fingerprint(directory: Path) -> bytes:
    """Identifies the files that a rank sees by names, sizes, the small state file of a checkpoint
    and samples: the same path may hold an older version on another node.
    """
    if not directory.is_dir():
        return b""
    files = sorted(f"{path.name} {path.stat().st_size}" for path in directory.glob("*.*"))
    hasher = Hasher("\n".join(files).encode())
    for state in (directory / "trainer_state.json", directory.parent / "trainer_state.json"):
        if state.exists():
            hasher.update(state.read_bytes())  # whoever resumes says if it is damaged
    for path in weight_files(directory):
        for part in samples(path):
            hasher.update(part)
    return hasher.hexdigest().encode()
