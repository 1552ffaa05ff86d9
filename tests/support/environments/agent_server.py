"""A server of an agent that uses only the standard library: `agent_server.py PORT`; the task's prompt
names its behaviour."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOGETHER = threading.Barrier(3)


def ask(task: dict[str, Any]) -> None:
    session = task["session"]
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {session['api_key']}",
    }
    body = json.dumps({"model": "any", "messages": task["messages"]}).encode()
    url = session["openai_base_url"] + "/chat/completions"
    request = urllib.request.Request(url, body, headers)  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        answer.read()


def play(task: dict[str, Any]) -> float:
    """Returns its process id as the reward."""
    ask(task)
    mode = task["prompt"]
    if mode == "together":
        TOGETHER.wait(60)
    if mode in ("dies once", "stops"):
        path = Path(task["columns"]["folder"])
        (path / str(os.getpid())).touch()
        first = len(list(path.iterdir())) == 1
        if first and mode == "dies once":
            TOGETHER.wait(60)  # so that several episodes are lost
            os.kill(os.getpid(), signal.SIGKILL)
        if first and mode == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
    return float(os.getpid())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/run"
        self.answer(json.dumps(play(task)).encode())

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    if not sys.argv[1].isdecimal():
        print("the port is no number")
        sys.exit(int(sys.argv[2]))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
