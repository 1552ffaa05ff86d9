"""A model is pushed to a hub on a local port, in which an older one is."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trainer.api.hub import push

NAME = "me/model"


class _Hub(ThreadingHTTPServer):
    """The files of one repository, with the calls by which a folder is uploaded."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files


class _Handler(BaseHTTPRequestHandler):
    server: _Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
            for path, content in self.server.files.items()
        ]
        siblings = [{"rfilename": path} for path in self.server.files]
        info = {"id": NAME, "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []}
        self._send(entries if "/tree/" in self.path else info)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://127.0.0.1:{self.server.server_port}/{NAME}"
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            self._send({"files": [{"path": file["path"], **plain} for file in asked]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                self._commit(json.loads(line))
            self._send({"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40})
        else:
            self._send({"url": address, "name": NAME, "errors": [], "warnings": []})

    def _commit(self, change: dict[str, Any]) -> None:
        path = change["value"].get("path")
        if change["key"] == "file":
            self.server.files[path] = base64.b64decode(change["value"]["content"])
        elif change["key"] == "deletedFile":
            del self.server.files[path]

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


OLD = {
    "README.md": b"old",
    "config.json": b"old",
    "model-00001-of-00002.safetensors": b"old",
    "model.safetensors.index.json": b"old",
    "adapter_config.json": b"old",
    "adapter_model.safetensors": b"old",
    "chat_template.jinja": b"old",
    "additional_chat_templates/rag.jinja": b"old",
    "added_tokens.json": b"old",
}
MINE = {"notes.txt": b"mine", "data/model.safetensors": b"mine", "models/adapter.md": b"mine"}


@pytest.fixture
def hub() -> Iterator[_Hub]:
    with _Hub(OLD | MINE) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_model_that_is_pushed_replaces_an_older_one(
    hub: _Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would apply the adapter, and the chat template, of the older one to it."""
    new = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    for name in new:
        (tmp_path / name).write_text(f"new {name}")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert push(tmp_path, NAME, private=None, token="hf_none") is not None  # noqa: S106
    assert hub.files == MINE | {name: f"new {name}".encode() for name in new}
