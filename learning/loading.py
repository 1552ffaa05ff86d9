"""Loads models from the hub, a directory or a checkpoint; no rank ever holds a whole sharded model.

A sharded model is built on the meta device and sharded; then every rank reads its own slices of the
safetensors files, or its own experts of a mixture. If other ranks do not see the files, or the
files' tensors differ from the model's in another way, rank 0 reads and sends one tensor at a time.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, GenerationConfig

from common.models.hub import refuse_random
from common.process import progress
from common.settings.config import Config
from common.weights.checksums import Hasher
from learning.hub_names import Sources, from_hub, hub_shapes, learn, sources
from learning.ranks import Ranks
from learning.sharding import local, named_tensors, prepare, region, shard

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


_UNREAD = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Outputs that a saved configuration may ask of every forward pass."""

_ALIGNMENT = 64
"""Bytes; torch allocates memory at multiples of it."""
_OWN_HEAD = (
    "the files of %s have a head that differs from the embedding, while its config.json ties the "
    "two (tie_word_embeddings true): the head is kept; set it to false there"
)
_SHOWN = 3
"""Names in a warning."""
_SAMPLE_BYTES = 4096
"""Bytes of each tensor by which ranks notice that they see different files."""


def only_logits(config: Any) -> None:
    """Switches off, in place, what a model's configuration wants computed besides logits: nobody
    here reads it.

    The router logits lead to an auxiliary loss, which fails on the engine's batches.
    """
    for part in (config, config.get_text_config()):
        for name in _UNREAD:
            if getattr(part, name, False):
                setattr(part, name, False)


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


class Reader(Protocol):
    """A source of tensors, in files or in memory."""

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Returns the part of a tensor in `region`."""


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


class MemoryReader:
    """Reads tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][region]


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
    model's configuration.
    """

    auto: Any
    name: str
    directory: Path | None = None
    trust_remote_code: bool = False
    configure: Callable[[Any], None] = lambda _: None
    added: AddedModules | None = None

    @property
    def source(self) -> str:
        """Name or directory of the model on this rank, or at least of its configuration."""
        return str(self.directory) if self.directory and self.directory.is_dir() else self.name

    def config(self) -> Any:
        config = AutoConfig.from_pretrained(self.source, trust_remote_code=self.trust_remote_code)
        only_logits(config)
        self.configure(config)
        return config

    def plain(self) -> Any:
        """Loads the tensors in the files into CPU memory. Raises OSError or ValueError, also when
        the files lack a tensor that `added` does not initialise.
        """
        model, found = self.auto.from_pretrained(
            self.source,
            config=self.config(),
            dtype=torch.float32,
            trust_remote_code=self.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        added = self.added or AddedModules()
        own = named_tensors(model)
        missing: list[str] = []
        for name in found["missing_keys"]:
            if name not in own or added.first(name, own[name].shape) is None:
                missing.append(name)
        refuse_random(missing)
        _warn_of_unused(model, found["unexpected_keys"], self.source)
        if getattr(model.config, "tie_word_embeddings", False) and len(_head_names(model)) == 1:
            _note_own_head(model)
            log.warning(_OWN_HEAD, self.source)
        return model

    def whole(self) -> Any:
        """Loads the model with its added modules into CPU memory. Raises OSError or ValueError."""
        model = self.plain()
        if self.added:
            self.added.change(model)
            self.fill_added(model)
        return model

    def fill_added(self, model: Any) -> dict[str, Tensor]:
        """Initialises tensors missing in the files; returns this rank's shares of the others by
        their names there.
        """
        added = self.added or AddedModules()
        targets: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                first = added.first(name, tensor.shape)
                if first is None:
                    targets[added.name(name)] = tensor
                else:
                    local(tensor).copy_(first[region(tensor)])
        return targets

    def names(self, model: Any) -> dict[str, Tensor]:
        """Returns the model's tensors by their names without `added`, tied ones by each name."""
        added = self.added or AddedModules()
        return {
            added.name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()
        }

    def empty(self) -> Any:
        """Builds the modules, with parameters on the meta device and initialised buffers."""
        with _parameters_on_meta():
            model = self.auto.from_config(
                self.config(), dtype=torch.float32, trust_remote_code=self.trust_remote_code
            )
            if self.added:
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
        if ranks.local_rank == 0:
            snapshot_download(self.name, allow_patterns=_FILES)
        ranks.barrier()
        return Path(snapshot_download(self.name, allow_patterns=_FILES, local_files_only=True))


@contextmanager
def _damage_as_os_error() -> Iterator[None]:
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
    """Returns `wrap(model)` on this rank's device: sharded, or whole and equal to rank 0's.

    Raises OSError or ValueError when the model cannot be loaded. See `sharding.shard` for the last
    three arguments.
    """
    if not ranks.sharded:
        model = pretrained.whole().to(ranks.device)
        _align(model)
        ranks.broadcast_model(model)
        if low_precision:
            _keep_states_in_bfloat16(model)
        prepare(model, config.trainer, trained=trained, device=ranks.device)
        return wrap(model)

    # Build and shard the modules without weights.
    directory = pretrained.files(ranks)
    names = ranks.broadcast(list(_shapes_in(directory)) if ranks.is_rank_zero else [])
    model = pretrained.empty()
    own_names = learn(model, pretrained.names(model), names)
    has_own_head = ranks.is_rank_zero and _has_own_head(model, directory, own_names)
    if ranks.broadcast(has_own_head) and len(_head_names(model)) > 1:
        head = model.get_output_embeddings()
        requires_grad = head.weight.requires_grad
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=requires_grad)
        _note_own_head(model)
        if ranks.is_rank_zero:
            log.warning(_OWN_HEAD, pretrained.source)
    unused = set(own_names.values()) - pretrained.names(model).keys()
    root = wrap(model)
    prepare(model, config.trainer, trained=trained, device=ranks.device)
    offload = config.parallel.offload_optimizer and trained
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
    materialise(root, torch.device("cpu") if offload else ranks.device, ranks.device)
    targets = pretrained.fill_added(model)

    # Fill them: every rank from the files, if all see the same ones and they fit; else from rank 0.
    shared = ranks.all_equal(_fingerprint(directory))
    reader: Reader | None = None
    if shared or ranks.is_rank_zero:
        reader = model_reader(directory, model, targets)
    everywhere = shared and ranks.all_equal(b"" if reader is None else b"fits")
    if ranks.is_rank_zero and reader is None:
        log.info(
            "the files in %s do not have the model's own tensors: "
            "transformers loads the whole model on rank 0",
            directory,
        )
        reader = MemoryReader(pretrained.plain().state_dict())
    elif ranks.is_rank_zero:
        _warn_of_unused(model, unused, pretrained.source)
    if ranks.is_rank_zero and not everywhere and ranks.world_size > 1:
        log.info("rank 0 reads %s and sends it to the others", directory)
    fill(targets, reader, ranks, everywhere)
    return root


def _head_names(model: Any) -> list[str]:
    """Returns the names of the head's weight: also the embedding's if the two are tied."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter is head]


def _has_own_head(model: Any, directory: Path, own_names: Mapping[str, str]) -> bool:
    """Whether the head is not the embedding. If the model has tied the two and its files have both,
    with different numbers, then transformers keeps both, whatever `tie_word_embeddings` says.

    `own_names` are the model's names of the tensors in the files.
    """
    tied = _head_names(model)
    if len(tied) < 2:
        return True
    in_files = [name for name, own in own_names.items() if own in tied]
    if len(in_files) < 2:
        return False
    reader = SafetensorsReader(directory)
    first = reader.read(in_files[0], ())
    second = reader.read(in_files[1], ())
    return not torch.equal(first.float(), second.float())


def _note_own_head(model: Any) -> None:
    """Makes the configuration, with which the model is saved and published, say what it is."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _warn_of_unused(model: Any, names: Iterable[str], source: str) -> None:
    """Warns of tensors in the files that the model does not have, such as biases that its
    configuration switches off.

    `names` are those that they would have in the model. A model without a language-model head,
    such as a critic, has no use for other heads either.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or []
    computed = tuple(name.rpartition(".")[2] for name, _ in model.named_buffers())
    body = "" if _head_names(model) else f"{model.base_model_prefix}."
    unused = sorted(
        name
        for name in names
        if name.startswith(body)
        and not name.endswith(computed)
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    if unused:
        names = ", ".join([*unused[:_SHOWN], *(["…"] if len(unused) > _SHOWN else [])])
        told = f"{len(unused)} tensors that {type(model).__name__} does not have"
        log.warning("the files of %s have %s, and that are left out: %s", source, told, names)


def _align(model: nn.Module) -> None:
    """Moves weights that lie where they did in their file, at any address, to memory of their own.

    On a CPU the last bits of a product depend on the alignment of its factors: without this, a
    model would compute otherwise after a restart, with the same weights from another file.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


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
    """Opens the files if they have the model's tensors, under any names, or each of their experts
    by itself; else returns None.
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


def fill(
    targets: Mapping[str, Tensor], reader: Reader | None, ranks: Ranks, everywhere: bool
) -> None:
    """Reads this rank's share of every tensor. Unless `everywhere`, rank 0 reads and sends."""
    with torch.no_grad():
        for name, target in targets.items():
            own = local(target)
            part = region(target)
            if not everywhere and ranks.world_size > 1:
                whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
                if ranks.is_rank_zero and reader:
                    everything = tuple(slice(0, size) for size in target.shape)
                    whole.copy_(reader.read(name, everything))
                dist.broadcast(whole, 0)
                own.copy_(whole[part])
            elif reader and own.numel():
                own.copy_(reader.read(name, part))
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


def _fingerprint(directory: Path) -> bytes:
    """Identifies the files that a rank sees by names, sizes, the small state file of a checkpoint
    and a piece of every tensor: the same path may hold an older version on another node.
    """
    if not directory.is_dir():
        return b""
    files = sorted(f"{path.name} {path.stat().st_size}" for path in directory.glob("*.*"))
    hasher = Hasher("\n".join(files).encode())
    for state in (directory / "trainer_state.json", directory.parent / "trainer_state.json"):
        if state.exists():
            hasher.update(state.read_bytes())  # whoever resumes says if it is damaged
    for path in weight_files(directory):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size)
            hasher.update(header)
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            for tensor in tensors.values():
                begin, end = tensor["data_offsets"]
                middle = (begin + end) // 2
                file.seek(8 + size + middle)
                hasher.update(file.read(min(_SAMPLE_BYTES, end - middle)))
    return hasher.hexdigest().encode()
