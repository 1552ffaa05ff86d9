"""Stand-ins for the models of a Tinker server: they compute with a few numbers, exactly and at
once, so that tests of the protocol need no torch.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import numpy as np

from common.clients.rollout import RolloutClient
from common.errors import Conflict, InvalidInput, NotFound
from common.weights.checksums import checksum
from services.rollout.engine_client import EngineClient
from trainer.tinker.interface import AdamParams, Array, Datum, LoraSpec, Outputs
from trainer.tinker.sampling import Adapters
from trainer.tinker.server import TinkerServer

if TYPE_CHECKING:
    from trainer.tinker.learner import RunLearner

BASE = "tiny/base"


class CountingLearner:
    """Has the methods of `RunLearner`; a run is a weight and a gradient."""

    def __init__(self) -> None:
        self.runs: dict[str, Array] = {}
        self.calls: list[tuple[str, str]] = []
        self.noise = 0.0
        """Added to losses, for computing that cannot be repeated."""
        self.breaks_at = ""
        """The call that breaks after it has changed the run."""

    def _run(self, run: str, call: str) -> Array:
        self.calls.append((call, run))
        if run not in self.runs:
            raise NotFound("there is no such run", field="run", value=run)
        return self.runs[run]

    def create(self, run: str, spec: LoraSpec) -> None:
        self.calls.append(("create", run))
        if run in self.runs:
            raise Conflict("it exists")
        self.runs[run] = np.array([float(spec.seed or 0) % 97, 0.0])

    def forward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]
    ) -> Outputs:
        state = self._run(run, "forward")
        if loss != "cross_entropy":
            raise InvalidInput("this loss is not served", field="loss_fn", value=loss)
        found = [np.asarray(datum.tokens, np.float32) * np.float32(state[0]) for datum in data]
        total = sum(float(each.sum()) for each in found)
        return Outputs(found, {"loss:sum": total + self.noise})

    def forward_backward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]
    ) -> Outputs:
        outputs = self.forward(run, data, loss, config)
        self.runs[run][1] += sum(sum(datum.tokens) for datum in data)
        if self.breaks_at == "forward_backward":
            self.breaks_at = ""
            raise RuntimeError("broken")
        return outputs

    def optim_step(self, run: str, adam: AdamParams) -> dict[str, float]:
        state = self._run(run, "optim_step")
        state[0] -= adam.learning_rate * state[1]
        state[1] = 0.0
        return {"weight:mean": float(state[0])}

    def save(self, run: str, folder: Path) -> None:
        state = self._run(run, "save")
        folder.mkdir()
        np.save(folder / "state.npy", state)

    def load(self, run: str, folder: Path, optimizer: bool) -> None:
        self.calls.append(("load", run))
        self.runs[run] = np.load(folder / "state.npy")
        if not optimizer:
            self.runs[run][1] = 0.0

    def export_adapter(self, run: str, folder: Path) -> str:
        self.save(run, folder)
        file = folder / "adapter_model.safetensors"
        file.write_bytes(self.runs[run].tobytes())
        return checksum(file)

    def unload(self, run: str) -> None:
        self.calls.append(("unload", run))
        self.runs.pop(run, None)


class EchoEngine:
    """An engine whose answers say which adapter and seed they are of."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.hangs = False
        self.restarts = 0
        """How often it will start again right after it has loaded an adapter."""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.hangs:
            await asyncio.Event().wait()
        body = json.loads(request.content or b"{}")
        path = request.url.path
        if path == "/v1/models":
            cards = [
                {"id": name, "root": root, "parent": BASE} for name, root in self.adapters.items()
            ]
            return httpx.Response(200, json={"data": cards})
        if path == "/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            if self.restarts:
                self.restarts -= 1
                self.adapters.clear()
        elif path == "/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/generate":
            return self._generate(body)
        return httpx.Response(200, json={"success": True})

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        self.requests.append(body)
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            error = {"code": "bad_adapter", "message": "Got LoRA adapter that is not loaded"}
            return httpx.Response(400, json={"error": error})
        sampling = body["sampling_params"]
        weight = 0.0
        if adapter is not None:
            file = Path(self.adapters[adapter]) / "adapter_model.safetensors"
            weight = float(np.frombuffer(file.read_bytes())[0])
        if sampling["max_new_tokens"] == 0:
            scores = [[None if not i else weight, t, None] for i, t in enumerate(body["input_ids"])]
            meta: dict[str, Any] = {"input_token_logprobs": scores}
            others = {
                "input_top_logprobs": range(body.get("top_logprobs_num", 0)),
                "input_token_ids_logprobs": body.get("token_ids_logprob", ()),
            }
            for name, tokens in others.items():
                meta[name] = [None]
                for place in range(1, len(scores)):
                    meta[name].append([[-place - token / 64, token, None] for token in tokens])
            return httpx.Response(200, json={"meta_info": meta})
        answers = []
        for index in range(sampling["n"]):
            tokens = [(sampling["sampling_seed"] + index) % 400, 7]
            meta = {
                "finish_reason": {"type": "stop", "matched": 7},
                "output_token_logprobs": [[weight, token, None] for token in tokens],
            }
            answers.append({"output_ids": tokens, "meta_info": meta})
        return httpx.Response(200, json=answers if len(answers) > 1 else answers[0])


def make_server(
    directory: Path, learner: CountingLearner, engine: EchoEngine, **options: Any
) -> TinkerServer:
    """Returns a server with stand-ins for its models."""
    transport = httpx.MockTransport(engine.answer)
    control = EngineClient("engine", "http://engine", transport=transport)
    return TinkerServer(
        directory,
        cast("RunLearner", learner),
        RolloutClient("engine", "http://engine", transport=transport, deadline_s=5),
        Adapters(lambda: [control], most=2),
        base_model=BASE,
        max_context_tokens=64,
        **options,
    )
