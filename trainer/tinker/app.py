"""Tinker's HTTP API: short handlers over `server`.

What is not served here is refused by its name, with what serves instead.
"""

import datetime
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from common.errors import InvalidInput, NotFound, Unauthorized
from common.process.metrics import Metrics
from services.http.app import create_app
from trainer.tinker import requests
from trainer.tinker.clients import Clients
from trainer.tinker.records import Checkpoint, Operation, Result, Run, Sampler, Session
from trainer.tinker.server import TinkerServer

_API = "/api/v1"
_MAX_BODY_BYTES = 64 << 20
"""The SDK cuts its passes into requests of 5 MB."""
_MAX_REQUESTS = 4096
"""Each of the SDK's futures may have a question open."""
_PROTOBUF = "application/x-protobuf"
_LINK_S = 3600
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
    "projects": "a key for each client in TINKER_KEYS",
    "audit": "the access log of the server",
}
_MODEL_LIMITS = {"trainable": True, "sampleable": True}


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
        not_ready=lambda: server.failure,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=_MAX_BODY_BYTES,
        max_requests=_MAX_REQUESTS,
        fails=(400, 404, 422),
        access_level=logging.DEBUG,  # a step makes dozens of calls
        keyed_path=_API,
    )
    calls = _Calls(server, clients, tokenizer)
    for path, handler in calls.posts().items():
        app.post(f"{_API}/{path}")(calls.checked(handler))
    for path, handler in calls.gets().items():
        app.get(f"{_API}/{path}")(calls.checked(handler))
    runs = f"{_API}/training_runs/{{run}}"
    app.get(f"{_API}/files/{{run}}/{{name}}/{{file}}")(calls.file)
    app.delete(runs)(calls.checked(calls.delete_run))
    app.delete(f"{runs}/checkpoints/{{kind}}/{{name}}")(calls.checked(calls.delete_checkpoint))
    app.put(f"{runs}/checkpoints/{{kind}}/{{name}}/ttl")(calls.checked(calls.set_ttl))
    app.api_route(f"{_API}/{{rest:path}}", methods=["GET", "POST", "PUT", "DELETE"])(
        calls.checked(calls.refuse)
    )
    return app


Handler = Callable[..., Any]


class _Calls:
    """The calls. A handler gets the request and the name of the client, and returns a response, or
    what becomes JSON.
    """

    def __init__(self, server: TinkerServer, clients: Clients, tokenizer: str) -> None:
        self._server = server
        self._clients = clients
        self._tokenizer = tokenizer
        self._secret = secrets.token_bytes(32)
        """Of links to files, which end with this process."""

    def checked(self, handler: Handler) -> Handler:
        """Returns a route that checks the client's key before the body is read."""

        async def call(request: Request) -> Response:
            owner = self._clients.owner(request.headers)
            answer = await handler(request, owner)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        call.__doc__ = handler.__doc__
        call.__name__ = handler.__name__
        return call

    def posts(self) -> dict[str, Handler]:
        return {
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session}/finish": self.finish_session,
            "client/config": self.config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.info,
            "forward": self.forward_backward,
            "forward_backward": self.forward_backward,
            "optim_step": self._operation("optim_step", requests.OptimStep),
            "save_weights": self._operation("save_weights", requests.SaveWeights),
            "save_weights_for_sampler": self._operation(
                "save_weights_for_sampler", requests.SaveForSampler
            ),
            "save_weights_external": self._operation(
                "save_weights_external", requests.SaveExternal
            ),
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampler,
            "join_sampling_session": self.join_sampler,
            "asample": self.sample,
            "retrieve_future": self.retrieve,
            "retrieve_futures": self.retrieve_many,
            "cancel_future": self.cancel,
        }

    def gets(self) -> dict[str, Handler]:
        return {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
            "sessions/{session}": self.session,
            "samplers/{sampler}": self.sampler,
            "training_runs": self.runs,
            "training_runs/{run}": self.run,
            "training_runs/{run}/checkpoints": self.checkpoints,
            "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": self.links,
            "checkpoints": self.all_checkpoints,
        }

    # ------------------------------------------------------------ service

    async def healthz(self, request: Request, owner: str) -> Any:
        """The server answers."""
        return {"status": "ok"}

    async def capabilities(self, request: Request, owner: str) -> Any:
        """The model that is served."""
        model = {
            "model_name": self._server.base_model,
            "max_context_length": self._server.max_context_tokens,
            **_MODEL_LIMITS,
        }
        return {"supported_models": [model]}

    async def config(self, request: Request, owner: str) -> Any:
        """How the SDK is to call: keys without an exchange, and one question for all samples."""
        return {"pjwt_auth_enabled": False, "sample_use_retrieve_futures": True}

    async def dynamic_config(self, request: Request, owner: str) -> Any:
        """What the SDK asks for again and again."""
        return {"sample_cancel_enabled": True}

    async def telemetry(self, request: Request, owner: str) -> Any:
        """Accepts what the SDK reports of itself, and drops it."""
        return {"status": "accepted"}

    async def create_session(self, request: Request, owner: str) -> Any:
        """Begins a session."""
        body = requests.parse(requests.CreateSession, await request.body())
        session = await self._server.create_session(owner, body)
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self, request: Request, owner: str) -> Any:
        """The client is there. 410 for a session that is finished."""
        body = requests.parse(requests.SessionBody, await request.body())
        self._server.state.session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request, owner: str) -> Any:
        """Ends a session."""
        await self._server.finish_session(owner, request.path_params["session"])
        return Response(status_code=204)

    async def session(self, request: Request, owner: str) -> Any:
        """The runs and samplers of a session."""
        state = self._server.state
        found = state.find(Session, request.path_params["session"], owner)
        runs = [each.id for each in state.owned(Run, owner) if each.session == found.id]
        samplers = [each.id for each in state.owned(Sampler, owner) if each.session == found.id]
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": found.about.get("user_metadata"),
            "display_name": found.about.get("display_name"),
        }

    # ------------------------------------------------------------ runs

    async def create_model(self, request: Request, owner: str) -> Any:
        """Begins a run."""
        content = await request.body()
        body = requests.parse(requests.CreateModel, content)
        return _future(await self._server.create_run(owner, body, content))

    async def forward_backward(self, request: Request, owner: str) -> Any:
        """Computes a loss, and its gradient unless the request says forward only."""
        return _future(await self._server.accept_pass(owner, await request.body()))

    def _operation(self, kind: str, form: type[requests.Numbered]) -> Handler:
        async def accept(request: Request, owner: str) -> Any:
            content = await request.body()
            body = requests.parse(form, content)
            return _future(await self._server.accept(owner, kind, body, content))

        accept.__doc__ = f"Accepts `{kind}`."
        accept.__name__ = kind
        return accept

    async def load_weights(self, request: Request, owner: str) -> Any:
        """Loads saved weights, into a run or as a new one."""
        content = await request.body()
        body = requests.parse(requests.LoadWeights, content)
        return _future(await self._server.load(owner, body, content))

    async def info(self, request: Request, owner: str) -> Any:
        """What a run is."""
        body = requests.parse(requests.RunBody, await request.body())
        run = self._server.state.find(Run, body.model_id, owner)
        name = self._server.base_model
        return {
            "type": "get_info",
            "model_data": {"model_name": name, "tokenizer_id": self._tokenizer},
            "model_id": run.id,
            "is_lora": True,
            "lora_rank": run.rank,
            "model_name": name,
        }

    async def weights_info(self, request: Request, owner: str) -> Any:
        """The adapter behind a path."""
        body = requests.parse(requests.TinkerPath, await request.body())
        checkpoint = self._server.state.find(Checkpoint, body.tinker_path, owner)
        run = self._server.state.find(Run, checkpoint.run, owner)
        return {
            "base_model": self._server.base_model,
            "is_lora": True,
            "lora_rank": run.rank,
            "train_unembed": run.train_unembed,
            "train_mlp": run.train_mlp,
            "train_attn": run.train_attn,
        }

    async def runs(self, request: Request, owner: str) -> Any:
        """All runs of the client, the newest first."""
        found, cursor = _page(request, self._server.state.owned(Run, owner))
        return {"training_runs": [self._run(run) for run in found], "cursor": cursor}

    async def run(self, request: Request, owner: str) -> Any:
        """One run."""
        return self._run(self._server.state.find(Run, request.path_params["run"], owner))

    def _run(self, run: Run) -> dict[str, Any]:
        latest: dict[str, Any] = {}
        for each in self._server.state.all(Checkpoint):
            if each.run == run.id:
                latest[each.kind] = _checkpoint(each)
        return {
            "training_run_id": run.id,
            "base_model": self._server.base_model,
            "model_owner": run.owner,
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": _time(run.used),
            "last_checkpoint": latest.get("weights"),
            "last_sampler_checkpoint": latest.get("sampler_weights"),
            "user_metadata": run.about,
        }

    async def delete_run(self, request: Request, owner: str) -> Any:
        """Removes a run with its weights; it no longer counts towards the client's runs."""
        await self._server.delete_run(owner, request.path_params["run"])
        return Response(status_code=204)

    # ------------------------------------------------------------ checkpoints

    async def checkpoints(self, request: Request, owner: str) -> Any:
        """The saved weights of a run."""
        run = self._server.state.find(Run, request.path_params["run"], owner)
        found = self._server.state.owned(Checkpoint, owner)
        return {"checkpoints": [_checkpoint(each) for each in found if each.run == run.id]}

    async def all_checkpoints(self, request: Request, owner: str) -> Any:
        """The saved weights of all runs."""
        found, cursor = _page(request, self._server.state.owned(Checkpoint, owner))
        return {"checkpoints": [_checkpoint(each) for each in found], "cursor": cursor}

    async def delete_checkpoint(self, request: Request, owner: str) -> Any:
        """Removes saved weights."""
        await self._server.delete_checkpoint(owner, _path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request, owner: str) -> Any:
        """Changes when saved weights expire."""
        body = requests.parse(requests.Ttl, await request.body())
        await self._server.set_ttl(owner, _path(request), body.ttl_seconds)
        return Response(status_code=204)

    async def links(self, request: Request, owner: str) -> Any:
        """Links to the files of weights for downloads, which need no key for an hour."""
        checkpoint = self._server.state.find(Checkpoint, _path(request), owner)
        expires = int(time.time()) + _LINK_S
        urls = {}
        for file in sorted(self._server.state.files(checkpoint).iterdir()):
            place = f"{checkpoint.run}/{checkpoint.name}/{file.name}"
            signature = self._signature(place, expires)
            address = f"{str(request.base_url).rstrip('/')}{_API}/files/{place}"
            urls[file.name] = f"{address}?expires={expires}&signature={signature}"
        return {"urls": urls, "expires": _time(expires)}

    async def file(
        self, run: str, name: str, file: str, expires: int = 0, signature: str = ""
    ) -> FileResponse:
        """A file of weights, for whoever has a link to it."""
        expected = self._signature(f"{run}/{name}/{file}", expires)
        if expires < time.time() or not hmac.compare_digest(expected, signature):
            raise Unauthorized("this link is not valid (any more)", remedy="ask for new links")
        for checkpoint in self._server.state.all(Checkpoint):
            if checkpoint.path == f"tinker://{run}/external_weights/{name}":
                return FileResponse(self._server.state.files(checkpoint) / Path(file).name)
        raise NotFound("these weights were deleted", field="name", value=name)

    def _signature(self, place: str, expires: int) -> str:
        message = f"{place} {expires}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    # ------------------------------------------------------------ samplers

    async def create_sampler(self, request: Request, owner: str) -> Any:
        """Begins to sample from saved weights, or from the base model."""
        body = requests.parse(requests.CreateSampler, await request.body())
        sampler = await self._server.create_sampler(owner, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def join_sampler(self, request: Request, owner: str) -> Any:
        """A number for a copy of a sampling client."""
        body = requests.parse(requests.JoinSampler, await request.body())
        number = await self._server.join_sampler(owner, body.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    async def sampler(self, request: Request, owner: str) -> Any:
        """What a sampler samples from."""
        found = self._server.state.find(Sampler, request.path_params["sampler"], owner)
        name = self._server.base_model
        return {"sampler_id": found.id, "base_model": name, "model_path": found.path}

    async def sample(self, request: Request, owner: str) -> Any:
        """Samples completions of a prompt."""
        content = await request.body()
        body = requests.parse(requests.Sample, content)
        operation = await self._server.accept_sample(owner, body, content)
        ids = [f"{operation.request_id}:{index}" for index in range(body.num_samples)]
        return {**_future(operation), "sample_sequence_ids": ids}

    # ------------------------------------------------------------ futures

    async def retrieve(self, request: Request, owner: str) -> Any:
        """A result, as soon as it is there; 408 while it is not."""
        body = requests.parse(requests.Retrieve, await request.body())
        found = await self._server.result(owner, body.request_id)
        if found is None:
            waits = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waits, 408)
        return _result(found)

    async def retrieve_many(self, request: Request, owner: str) -> Any:
        """What a sampler has finished, as soon as there is any."""
        body = requests.parse(requests.RetrieveMany, await request.body())
        found, cursor = await self._server.news(owner, body)
        line = body.target.sampling_session_id
        states = [
            {"state": "finished" if ok else "failed", "request_id": f"{line}:op:{number}"}
            for number, _, ok in found
        ]
        return {"completions": states, "cursor": cursor}

    async def cancel(self, request: Request, owner: str) -> Any:
        """Ends a request of a sampler."""
        body = requests.parse(requests.Retrieve, await request.body())
        await self._server.cancel(owner, body.request_id)
        return Response(status_code=204)

    async def refuse(self, request: Request, owner: str) -> Any:
        """Refuses any other call by its name."""
        rest = request.path_params["rest"]
        parts = rest.split("/")
        instead = next((_INSTEAD[part] for part in parts if part in _INSTEAD), "")
        raise NotFound(
            f"this server does not serve {rest}",
            field="path",
            value=rest,
            remedy=f"use {instead}" if instead else "the calls that it serves are listed at /docs",
            code="not_served",
        )


def _future(operation: Operation) -> dict[str, Any]:
    return {"request_id": operation.request_id, "model_id": operation.line}


def _result(found: Result) -> Response:
    kind = "application/json" if found.is_json else _PROTOBUF
    headers = {"X-Sampled-From": found.weights} if found.weights else None
    return Response(found.content, media_type=kind, headers=headers)


def _path(request: Request) -> str:
    parts = request.path_params
    return f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
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


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Returns the part of a list that the query names with limit and offset, and which it is."""
    query = request.query_params
    limit = _number(query.get("limit", "20"))
    offset = _number(query.get("offset", "0"))
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _number(text: str) -> int:
    if not text.isdecimal():
        raise InvalidInput("this is not a whole number", field="limit, offset", value=text)
    return int(text)
