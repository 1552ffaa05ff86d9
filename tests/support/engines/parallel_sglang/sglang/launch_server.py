"""`python -m sglang.launch_server --nnodes 2 …`: processes that find each other like SGLang's, and read
weights from their own disks. Nobody notices that a peer is gone: the agents have to.

Speaks only what agents ask: health, the version, pauses, weights from disk and their checksums. Uses
only the standard library.
"""

import argparse
import hashlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
for name in ("model-path", "host", "weight-version", "dist-init-addr"):
    parser.add_argument(f"--{name}")
for name in ("port", "nnodes", "node-rank"):
    parser.add_argument(f"--{name}", type=int)
options, _ = parser.parse_known_args()
first_host, _, first_port = options.dist_init_addr.rpartition(":")


def checksum(directory: str) -> str:
    """Returns the checksum of a model on this node's disk."""
    return hashlib.md5((Path(directory) / "model.safetensors").read_bytes()).hexdigest()  # noqa: S324


def found_peers() -> list[socket.socket]:
    """Returns the connections of the first process, or the one to it; waits for all."""
    if options.node_rank == 0:
        with socket.create_server((first_host, int(first_port))) as server:
            return [server.accept()[0] for _ in range(options.nnodes - 1)]
    while True:
        try:
            return [socket.create_connection((first_host, int(first_port)), timeout=None)]
        except OSError:
            time.sleep(0.05)


peers = found_peers()
held = [checksum(options.model_path)]
version = options.weight_version


def load_everywhere(directory: str) -> list[str]:
    """Makes every process read the model at this path on its node; returns the checksums."""
    found = [checksum(directory)]
    for peer in peers:
        peer.sendall(f"{directory}\n".encode())
        found.append(peer.recv(100).decode())
    return found


def follow() -> None:
    """Reads what the first process says; goes on when that is gone."""
    with peers[0].makefile() as lines:
        for line in lines:
            peers[0].sendall(checksum(line.strip()).encode())


class Handler(BaseHTTPRequestHandler):
    """The calls of an agent."""

    def do_GET(self) -> None:
        self._answer({"weight_version": version} if self.path == "/model_info" else {})

    def do_POST(self) -> None:
        global held, version
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if self.path == "/update_weights_from_disk":
            held = load_everywhere(body["model_path"])
            version = body["weight_version"]
        if self.path == "/weights_checker":
            self._answer({"ranks": [{"checksums": {"model": sums}} for sums in held]})
        else:
            self._answer({"success": True})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


if options.node_rank == 0:
    held = load_everywhere(options.model_path)
else:
    threading.Thread(target=follow, daemon=True).start()
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
