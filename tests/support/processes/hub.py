"""A small Hugging Face hub on a local port, with enough of the HTTP API for `datasets` to load
parquet files."""

import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet

SHA = "0123456789abcdef0123456789abcdef01234567"
"""The only revision of every data set."""


class _Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: Mapping[str, Mapping[str, bytes]], silent_after: int | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.silent_after = files, silent_after
        self.asked = 0
        self.ending = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: _Hub

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.silent_after is not None and self.server.asked > self.server.silent_after:
            self.server.ending.wait(300)
            return
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.removeprefix("api/").removeprefix("datasets/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        files = self.server.files.get(name)
        if files is None or "datasets" not in path:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["resolve"]:
            self._file(files.get("/".join(rest[2:])))
        elif rest[:1] == ["tree"]:
            self._json(self._listing(files, rest[2:]))
        elif not rest or rest[0] == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json(
                {
                    "id": name,
                    "sha": SHA,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                }
            )
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _listing(self, files: Mapping[str, bytes], folder: list[str]) -> list[dict[str, Any]]:
        """Lists a folder's files and subfolders."""
        inside = {
            path: path.split("/")[len(folder) :]
            for path in files
            if path.split("/")[: len(folder)] == folder
        }
        folders = {"/".join([*folder, rest[0]]) for rest in inside.values() if len(rest) > 1}
        entries = [
            self._entry(path, files[path]) for path, rest in inside.items() if len(rest) == 1
        ]
        return entries + [
            {"type": "directory", "path": path, "size": 0, "oid": SHA} for path in sorted(folders)
        ]

    @staticmethod
    def _entry(path: str, data: bytes) -> dict[str, Any]:
        return {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),  # noqa: S324
        }

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        self._send(
            200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": SHA}
        )

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub(files: Mapping[str, Mapping[str, bytes]], silent_after: int | None = None) -> Iterator[str]:
    """Runs a hub inside the context and yields its address.

    Args:
        files: contents by path, for each data set.
        silent_after: after this many requests, the hub accepts connections but never answers.
    """
    server = _Hub(files, silent_after)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


CARD = """---
configs:
- config_name: {config}
  data_files:
  - split: train
    path: {folder}/train-*
  - split: test
    path: {folder}/test-*
---
"""


def table(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def data_set(
    config: str, train: list[dict[str, Any]], test: list[dict[str, Any]]
) -> dict[str, bytes]:
    return {
        "README.md": CARD.format(config=config, folder=config).encode(),
        f"{config}/train-00000-of-00001.parquet": table(train),
        f"{config}/test-00000-of-00001.parquet": table(test),
    }
