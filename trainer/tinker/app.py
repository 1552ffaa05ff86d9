"""Tinker's HTTP API: a table of calls over `server`, and their answers.

What is not served here is refused by its name, with what serves instead.
"""

import datetime
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from common import Json
from common.errors import NotFound, Unauthorized
from common.process.metrics import Metrics
from services.http.app import create_app, read_json
from services.http.openapi import JSON, OBJECT, described
from trainer.tinker import requests
from trainer.tinker.clients import Clients
from trainer.tinker.records import (
    Checkpoint,
    Sampler,
    TinkerOperation,
    TinkerResult,
    TinkerRun,
    TinkerSession,
)
from trainer.tinker.server import TinkerServer, too_many

_API = "/api/v1"
_MAX_BODY_BYTES = 64 << 20
"""The SDK cuts its passes into requests of 5 MB."""
_OF_CLIENT = 4096
"""Requests of a client at once. Each of the SDK's futures may have a question open."""
_MAX_REQUESTS = 6144
_PROTOBUF = "application/x-protobuf"
_BYTES = {"type": "string", "format": "binary"}
_LINK_S = 3600
_CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_INSTEAD = {
    "auth": "keys in TINKER_KEYS",
    "billing": "/metrics: nothing is billed",
    "create_custom_loss": "forward_backward_custom with a function, which the client computes",
    "copy_weights": "load_weights of the path, and save_state",
    "publish": "save_weights_external and a download",
    "project": "a key for each client in TINKER_KEYS",
    "audit": "the access log of the server",
    "search": "sessions, which lists all of the client's",
}
Handler = Callable[..., Awaitable[Any]]
_T = TypeVar("_T")
_B = TypeVar("_B", bound=requests.TinkerBody)


def create_tinker_app(
    server: TinkerServer,
    clients: Clients,
    tokenizer: str,
    lifespan: Callable[[], AbstractAsyncContextManager[None]],
    metrics: Metrics | None = None,
) -> FastAPI:
    """Returns the app. `tokenizer` names the tokenizer that clients load."""
    app = create_app(
        "tinker-server",
        not_ready=lambda: server.not_ready,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=_MAX_BODY_BYTES,
        max_requests=_MAX_REQUESTS,
        fails=(404, 409, 410, 422, 429),
        access_level=logging.DEBUG,  # a step makes dozens of calls
        keyed_path=_API,
    )
    calls = _Calls(app, clients)
    _add_fixed(calls, server)
    _add_operations(calls, server)
    _add_sessions(calls, server)
    _add_runs(calls, server, tokenizer)
    _add_checkpoints(calls, server)
    _add_links(calls, server)
    for method in ("GET", "POST", "PUT", "DELETE"):
        calls.add(method, "{rest:path}", _refuse)
    return app


class _Calls:
    """Adds calls to an app."""

    def __init__(self, app: FastAPI, clients: Clients) -> None:
        self.app = app
        self._clients = clients
        self._open: Counter[str] = Counter()
        """Requests of each client that have no answer yet."""

    def add(
        self, method: str, path: str, handler: Handler, unchecked: type[_B] | None = None
    ) -> Handler:
        """Adds a call, which checks the client's key before it reads the body.

        The handler gets the name of the client, the parts of the path, and as `body` what its type
        there says: the bytes or the request in JSON, with GET the query. `base_url` is the address
        that the client calls. A request of the form `unchecked` is passed as it is.
        """
        wanted = get_type_hints(handler)
        form = unchecked or wanted.get("body")
        is_protobuf = form is bytes

        async def call(request: Request) -> Response:
            owner = self._clients.owner(request.headers)
            arguments: Json = dict(request.path_params)
            if "base_url" in wanted:
                arguments["base_url"] = str(request.base_url).rstrip("/")
            if self._open[owner] >= _OF_CLIENT:  # with more, others would wait
                raise too_many(self._open[owner], "X-API-Key", owner)
            self._open[owner] += 1
            try:
                if is_protobuf:
                    arguments["body"] = await request.body()
                elif form is not None:
                    query = dict(request.query_params)
                    body = query if method == "GET" else await read_json(request)
                    arguments["body"] = body if unchecked else requests.validated(form, body)
                answer = await handler(owner, **arguments)
            finally:
                self._open[owner] -= 1

            if isinstance(answer, Response):
                return answer
            if answer is None:
                return Response(status_code=204)
            if isinstance(answer, TinkerResult):
                kind = JSON if answer.is_json else _PROTOBUF
                headers = {"X-Sampled-From": answer.weights} if answer.weights else None
                return Response(answer.content, media_type=kind, headers=headers)
            return JSONResponse(_future(answer) if isinstance(answer, TinkerOperation) else answer)

        call.__doc__ = handler.__doc__ or f"Tinker's `{path}`."
        call.__name__ = path.replace("/", "_")
        body = _BYTES if is_protobuf else form or OBJECT
        details = described(
            body if method in ("POST", "PUT") else None,
            OBJECT,
            reads=(_PROTOBUF if is_protobuf else JSON,),
            writes=(JSON, _PROTOBUF),
            statuses=(204 if wanted.get("return") is type(None) else 200,),
        )
        # FastAPI sees neither: `call` reads them from the request.
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)", path)
        ]
        details.setdefault("openapi_extra", {})["parameters"] = parameters
        self.app.api_route(f"{_API}/{path}", methods=[method], **details)(call)
        return handler

    def get(self, path: str) -> Callable[[Handler], Handler]:
        """Returns a decorator that adds a GET."""
        return partial(self.add, "GET", path)

    def post(self, path: str) -> Callable[[Handler], Handler]:
        """Returns a decorator that adds a POST."""
        return partial(self.add, "POST", path)


def _add_fixed(calls: _Calls, server: TinkerServer) -> None:
    """Adds the calls whose answer is always the same."""
    model = {
        "model_name": server.base_model,
        "max_context_length": server.max_context_tokens,
        "trainable": True,
        "sampleable": True,
    }
    # Keys are not exchanged for others, and one question is for all samples. Copies of a sampling
    # client count on from numbers of this server: the SDK would draw them, and with them the seeds.
    config = {
        "pjwt_auth_enabled": False,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
    }
    answers = {
        ("GET", "healthz"): {"status": "ok"},
        ("GET", "get_server_capabilities"): {"supported_models": [model]},
        ("POST", "client/config"): config,
        ("POST", "client/dynamic_config"): {"sample_cancel_enabled": True},
        # What the SDK reports of itself is dropped.
        ("POST", "telemetry"): {"status": "accepted"},
    }
    for (method, path), answer in answers.items():

        async def fixed(owner: str, answer: object = answer) -> Any:
            return answer

        calls.add(method, path, fixed)


def _add_operations(calls: _Calls, server: TinkerServer) -> None:
    """Adds the calls that are answered by a future, and those that ask for a future's result."""
    for kind, form in requests.OPERATIONS.items():

        async def accept(owner: str, body: Any, kind: str = kind) -> Any:
            return await server.accept(owner, kind, body)

        calls.add("POST", kind, accept, unchecked=form)
    calls.add("POST", "create_model", server.create_run)
    calls.add("POST", "forward", server.accept_pass)
    calls.add("POST", "forward_backward", server.accept_pass)
    calls.add("POST", "cancel_future", server.cancel)
    calls.add("POST", "load_weights", server.load, unchecked=requests.LoadWeights)

    @calls.post("asample")
    async def sample(owner: str, body: requests.Sample) -> Any:
        """Samples completions of a prompt."""
        operation = await server.accept_sample(owner, body)
        ids = [f"{operation.request_id}:{index}" for index in range(body.num_samples)]
        return {**_future(operation), "sample_sequence_ids": ids}

    @calls.post("retrieve_future")
    async def retrieve(owner: str, body: requests.Retrieve) -> Any:
        """A result, as soon as it is there; 408 while it is not."""
        found = await server.result(owner, body.request_id)
        if found:
            return found
        waits = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        missing = server.missing(body.request_id)
        if missing is not None:  # the SDK logs the reason
            waits["queue_state"] = "paused_capacity"
            waits["queue_state_reason"] = f"the request with seq_id {missing} has not arrived"
        return JSONResponse(waits, 408)

    @calls.post("retrieve_futures")
    async def retrieve_many(owner: str, body: requests.RetrieveMany) -> Any:
        """What a sampler has finished, as soon as there is any."""
        found, cursor = await server.news(owner, body)
        line = body.target.sampling_session_id
        states = [
            {"state": "finished" if ok else "failed", "request_id": f"{line}:op:{number}"}
            for number, _, ok in found
        ]
        return {"completions": states, "cursor": cursor}


def _add_sessions(calls: _Calls, server: TinkerServer) -> None:
    """Adds the calls for sessions and samplers."""
    state = server.state
    calls.add("POST", "sessions/{name}/finish", server.finish_session)

    @calls.post("create_session")
    async def create_session(owner: str, body: requests.CreateSession) -> Any:
        """Begins a session."""
        made = await server.create_session(owner, body)
        return {"type": "create_session", "session_id": made.id}

    @calls.post("session_heartbeat")
    async def heartbeat(owner: str, body: requests.SessionBody) -> Any:
        """Notes that the client still runs. 410 for a session that is finished."""
        state.session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    @calls.get("sessions")
    async def sessions(owner: str, body: requests.Page) -> Any:
        """All sessions of the client, the newest first."""
        found, _ = _page(body, state.owned(TinkerSession, owner))
        return {"sessions": [each.id for each in found]}

    @calls.get("sessions/{name}")
    async def session(owner: str, name: str) -> Any:
        """The runs and samplers of a session."""
        about = state.find(TinkerSession, name, owner).about
        runs = state.owned(TinkerRun, owner, session=name, failed=False)
        return {
            "training_run_ids": [each.id for each in runs],
            "sampler_ids": [each.id for each in state.owned(Sampler, owner, session=name)],
            "user_metadata": about.get("user_metadata"),
            "display_name": about.get("display_name"),
        }

    @calls.post("create_sampling_session")
    async def create_sampler(owner: str, body: requests.CreateSampler) -> Any:
        """Begins to sample from saved weights, or from the base model."""
        made = await server.create_sampler(owner, body)
        return {"type": "create_sampling_session", "sampling_session_id": made.id}

    @calls.post("join_sampling_session")
    async def join_sampler(owner: str, body: requests.JoinSampler) -> Any:
        """A number for a copy of a sampling client."""
        number = await server.join_sampler(owner, body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    @calls.get("samplers/{name}")
    async def sampler(owner: str, name: str) -> Any:
        """What a sampler samples from."""
        path = state.find(Sampler, name, owner).path
        return {"sampler_id": name, "base_model": server.base_model, "model_path": path}


def _add_runs(calls: _Calls, server: TinkerServer, tokenizer: str) -> None:
    state = server.state
    calls.add("DELETE", "training_runs/{name}", server.delete_run)

    def described(run: TinkerRun) -> Json:
        latest: Json = {}
        for each in state.owned(Checkpoint, run.owner, run=run.id):
            latest.setdefault(each.kind, _checkpoint(each))
        return {
            "training_run_id": run.id,
            "base_model": server.base_model,
            "model_owner": run.owner,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "last_request_time": _time(run.used),
            "last_checkpoint": latest.get("weights"),
            "last_sampler_checkpoint": latest.get("sampler_weights"),
            "user_metadata": run.about,
        }

    @calls.post("get_info")
    async def info(owner: str, body: requests.RunBody) -> Any:
        """What a run is."""
        run = state.find(TinkerRun, body.model_id, owner)
        return {
            "type": "get_info",
            "model_data": {"model_name": server.base_model, "tokenizer_id": tokenizer},
            "model_id": run.id,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_name": server.base_model,
        }

    @calls.get("training_runs")
    async def runs(owner: str, body: requests.Page) -> Any:
        """All runs of the client, the newest first."""
        found, cursor = _page(body, state.owned(TinkerRun, owner, failed=False))
        return {"training_runs": [described(each) for each in found], "cursor": cursor}

    @calls.get("training_runs/{name}")
    async def one(owner: str, name: str) -> Any:
        """One run."""
        return described(state.find(TinkerRun, name, owner))


def _add_checkpoints(calls: _Calls, server: TinkerServer) -> None:
    state = server.state
    calls.add("DELETE", _CHECKPOINT, server.delete_checkpoint)
    calls.add("PUT", f"{_CHECKPOINT}/ttl", server.set_ttl)

    @calls.get("training_runs/{name}/checkpoints")
    async def of_run(owner: str, name: str) -> Any:
        """The saved weights of a run."""
        state.find(TinkerRun, name, owner)
        found = state.owned(Checkpoint, owner, run=name)
        return {"checkpoints": [_checkpoint(each) for each in found]}

    @calls.get("checkpoints")
    async def checkpoints(owner: str, body: requests.Page) -> Any:
        """The saved weights of all runs."""
        found, cursor = _page(body, state.owned(Checkpoint, owner))
        return {"checkpoints": [_checkpoint(each) for each in found], "cursor": cursor}

    @calls.post("weights_info")
    async def weights_info(owner: str, body: requests.TinkerPath) -> Any:
        """The adapter behind a path."""
        checkpoint = state.find(Checkpoint, body.tinker_path, owner)
        lora = state.find(TinkerRun, checkpoint.run, owner).lora
        return {
            "base_model": server.base_model,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }


def _add_links(calls: _Calls, server: TinkerServer) -> None:
    """Adds downloads: links to the files of weights, which need no key for an hour."""
    state = server.state
    secret = secrets.token_bytes(32)  # the links end with this process

    def signature_of(place: str, expires: int) -> str:
        return hmac.new(secret, f"{place} {expires}".encode(), hashlib.sha256).hexdigest()

    @calls.get(f"{_CHECKPOINT}/external_weights_urls")
    async def links(owner: str, base_url: str, run: str, kind: str, name: str) -> Any:
        """Returns links to the files of weights."""
        checkpoint = state.checkpoint(owner, run, kind, name)
        expires = int(time.time()) + _LINK_S
        urls = {}
        for path in sorted(state.files(checkpoint).iterdir()):
            place = f"{run}/{name}/{path.name}"
            query = f"expires={expires}&signature={signature_of(place, expires)}"
            urls[path.name] = f"{base_url}{_API}/files/{place}?{query}"
        return {"urls": urls, "expires": _time(expires)}

    @calls.app.get(
        f"{_API}/files/{{run}}/{{name}}/{{file}}",
        **described(answer=_BYTES, writes=("application/octet-stream",)),
    )
    async def file(
        run: str, name: str, file: str, expires: int = 0, signature: str = ""
    ) -> FileResponse:
        """A file of weights, for whoever has a link to it."""
        expected = signature_of(f"{run}/{name}/{file}", expires)
        if expires < time.time() or not hmac.compare_digest(expected.encode(), signature.encode()):
            raise Unauthorized("this link is not valid (any more)", remedy="ask for new links")
        checkpoint = state.get(Checkpoint, f"tinker://{run}/external_weights/{name}")
        if checkpoint is None:
            raise NotFound("these weights were deleted", field="name", value=name)
        return FileResponse(state.files(checkpoint) / Path(file).name)


async def _refuse(owner: str, rest: str) -> Any:
    """Refuses any other call by its name."""
    instead = [_INSTEAD[part] for part in rest.split("/") if part in _INSTEAD]
    instead.append("one of the calls that are listed at /docs")
    raise NotFound(
        f"this server does not serve {rest}",
        field="path",
        value=rest,
        remedy=f"use {instead[0]}",
        code="not_served",
    )


def _future(operation: TinkerOperation) -> Json:
    return {"request_id": operation.request_id, "model_id": operation.line}


def _checkpoint(checkpoint: Checkpoint) -> Json:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "user_metadata": checkpoint.about,
        "expires_at": checkpoint.expires and _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _page(page: requests.Page, found: list[_T]) -> tuple[list[_T], dict[str, int]]:
    """Returns the part of a list that a client asks for, and which it is."""
    cursor = {"offset": page.offset, "limit": page.limit, "total_count": len(found)}
    return found[page.offset : page.offset + page.limit], cursor
