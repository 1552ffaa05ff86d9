"""A stand-in for SGLang 0.5.21 that records its control calls and refuses the same calls as SGLang.

The fields and their types come from SGLang's request classes, and so does the order of a session:
`begin`, updates, `end`, and no flush of the cache while requests run. Memory is released in a pause
and resumed once. Where SGLang's process would end (an assertion, `set.remove`, work without
memory), `ended` holds the reason. `recorded` holds every call with its body.
"""

from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class _Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Continue(_Body):
    torch_empty_cache: bool = True


class _Disk(_Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class _Group(_Body):
    group_name: str = "weight_update_group"


class _Init(_Group):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"


class _Session(_Body):
    pass


class _Begin(_Session):
    selector: Literal["target", "draft", "all"] = "all"


class _Update(_Group):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


class _Check(_Body):
    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: Literal["target", "draft", "all"] = "all"


class _LoadAdapter(_Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class _Memory(_Body):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class _UnloadAdapter(_Body):
    lora_name: str


class StrictSGLang:
    """The engine; its requests run except in a pause."""

    def __init__(self, checksums: dict[str, str]) -> None:
        self.recorded: list[dict[str, Any]] = []
        self._checksums = checksums
        self._paused = self._session = False
        self._groups: set[str] = set()
        self._version = "default"
        self._adapters: dict[str, str] = {}
        self.ended, self.offloaded = "", set[str]()
        self.refused = ""
        """Path of a call that must fail."""
        self.app = FastAPI()
        calls: dict[str, tuple[type[_Body], Any]] = {
            "/pause_generation": (_Pause, self._pause),
            "/continue_generation": (_Continue, self._continue),
            "/update_weights_from_disk": (_Disk, self._load),
            "/init_weights_update_group": (_Init, self._init),
            "/destroy_weights_update_group": (_Group, self._destroy),
            "/begin_weight_update": (_Begin, self._begin),
            "/update_weights_from_distributed": (_Update, self._update),
            "/end_weight_update": (_Session, self._end),
            "/weights_checker": (_Check, self._check),
            "/load_lora_adapter": (_LoadAdapter, self._load_adapter),
            "/unload_lora_adapter": (_UnloadAdapter, self._unload_adapter),
            "/release_memory_occupation": (_Memory, self._release),
            "/resume_memory_occupation": (_Memory, self._take_back),
        }
        for path, (kind, answer) in calls.items():
            self.app.post(path)(self._handler(path, kind, answer))
        self.app.get("/model_info")(self._info)
        self.app.get("/v1/models")(self._models)

    def _handler(self, path: str, kind: type[_Body], answer: Any) -> Any:
        async def handle(body: dict[str, Any]) -> JSONResponse:
            self.recorded.append({"call": path, **body})
            problem = (
                "CUDA out of memory" if path == self.refused else answer(kind.model_validate(body))
            )
            if path.endswith("_memory_occupation") and not problem:
                return JSONResponse(None, 500 if self.ended else 200)
            if isinstance(problem, dict):
                return JSONResponse(problem)
            return JSONResponse(
                {"success": not problem, "message": problem or "Success."}, 400 if problem else 200
            )

        return handle

    async def _info(self) -> dict[str, str]:
        self.recorded.append({"call": "GET /model_info"})
        return {"weight_version": self._version, "model_path": "/model"}

    async def _models(self) -> dict[str, Any]:
        cards = [{"id": "model", "root": "/model", "parent": None}]
        return {
            "data": cards
            + [
                {"id": name, "root": path, "parent": "model"}
                for name, path in self._adapters.items()
            ]
        }

    def _pause(self, _: _Pause) -> None:
        self._paused = True

    def _continue(self, _: _Continue) -> None:
        if self.offloaded:
            self.ended = f"requests run without {self.offloaded}"
        self._paused = False

    def _changed(self, flush: bool, version: str | None) -> str | None:
        if flush and not self._paused:
            return "Cache flush failed after updating weights"
        self._version = version or self._version
        return None

    def _load(self, body: _Disk) -> str | None:
        if not Path(body.model_path).is_dir():
            return "no such directory"
        if "weights" in self.offloaded:
            self.ended = "weights are loaded into memory that is released"
        return self._changed(body.flush_cache, body.weight_version)

    def _init(self, body: _Init) -> str | None:
        if body.group_name in self._groups:
            return "the group exists"
        self._groups.add(body.group_name)
        return None

    def _destroy(self, body: _Group) -> str | None:
        if body.group_name not in self._groups:
            return "The group to be destroyed does not exist."
        self._groups.discard(body.group_name)
        return None

    def _begin(self, _: _Begin) -> str | None:
        if self._session:
            return "a weight-update session is already open; call end_weight_update() first"
        self._session = True
        return None

    def _update(self, body: _Update) -> str | None:
        if not self._session:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        if body.group_name not in self._groups:
            return f"Group {body.group_name} not in {self._groups}"
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            return "names, dtypes and shapes differ in length"
        return self._changed(body.flush_cache, body.weight_version)

    def _end(self, _: _Session) -> str | None:
        if not self._session:
            return "no weight-update session is open; call begin_weight_update() first"
        self._session = False
        return None

    def _check(self, _: _Check) -> dict[str, Any]:
        return {"success": True, "message": "Success.", "ranks": [{"checksums": self._checksums}]}

    def _load_adapter(self, body: _LoadAdapter) -> str | None:
        if body.lora_name in self._adapters:
            return "it is already loaded"
        self._adapters[body.lora_name] = body.lora_path
        return None

    def _release(self, body: _Memory) -> None:
        if not self._paused:
            self.ended = "release_memory_occupation should be called only when server is idle"
        self.offloaded |= self._tags(body)

    def _take_back(self, body: _Memory) -> None:
        if not self._tags(body) <= self.offloaded:
            self.ended = f"KeyError: {self._tags(body) - self.offloaded}"
        self.offloaded -= self._tags(body)

    def _tags(self, body: _Memory) -> set[str]:
        return set(body.tags or ("weights", "kv_cache", "cuda_graph"))

    def _unload_adapter(self, body: _UnloadAdapter) -> str | None:
        return None if self._adapters.pop(body.lora_name, None) else "it is not loaded"
