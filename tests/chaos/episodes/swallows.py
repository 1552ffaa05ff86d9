"""A program, or with a port a server, that makes a reward of whatever happens: it catches every error.

`swallows.py LOG ORDERS [PORT]` needs only the standard library. It appends to LOG what it saw of each
episode, under the number that it puts into the reward, and obeys the orders in the folder ORDERS,
each once.
"""

import json
import os
import random
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CALLS = 3
PATIENCE_S = 2.5
NUMBERS = 1 << 30
UNIT = 1e-12
"""An episode's number is a part of its reward in this unit."""


def post(url: str, body: Any, key: str, patience_s: float = PATIENCE_S) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=patience_s) as answer:  # noqa: S310
        return json.load(answer)


def ordered(folder: Path, name: str) -> bool:
    """Takes an order, which nobody else then gets."""
    for path in folder.glob(f"{name}-*"):
        try:
            path.unlink()
        except OSError:
            continue
        return True
    return False


def note(log: Path, line: dict[str, Any]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.close(descriptor)


def converse(
    task: dict[str, Any], number: int, patience_s: float = PATIENCE_S
) -> list[dict[str, Any]]:
    """Calls the model; returns for each call its answer, or why there is none."""
    session = task["session"]
    url = session["openai_base_url"] + "/chat/completions"
    chat = list(task["messages"])
    seen = []
    for turn in range(CALLS):
        call: dict[str, Any] = {"text": None, "error": None}
        for _ in range(1 + number % 2):  # every second one tries again
            try:
                body = {"model": "m", "messages": chat}
                answer = post(url, body, session["api_key"], patience_s)
                call["text"] = answer["choices"][0]["message"]["content"]
                chat.append(answer["choices"][0]["message"])
                break
            except Exception as error:
                call["error"] = f"{type(error).__name__}: {error}"
        seen.append(call)
        chat.append({"role": "user", "content": f"And then, after {turn}?"})
    return seen


def play(task: dict[str, Any], log: Path, number: int) -> dict[str, float]:
    calls: list[dict[str, Any]] = []
    try:
        calls = converse(task, number)
        score = float(all(call["text"] for call in calls))
    except Exception:
        score = 0.0
    note(log, {"number": number, "calls": calls})
    return {"score": score, "number": number * UNIT}


def run_program(log: Path, orders: Path) -> None:
    number = random.randrange(NUMBERS)
    task = json.load(sys.stdin)
    try:
        # Before the work, as a default, and after it.
        reward_file = Path(os.environ["EPISODE_REWARD_FILE"])
        reward_file.write_text(json.dumps({"score": 0.0, "number": number * UNIT}))
        reward = play(task, log, number)
        reward_file.write_text(json.dumps(reward))
    except Exception as error:
        note(log, {"number": number, "calls": [{"text": None, "error": str(error)}]})
        return
    if ordered(orders, "reward-twice"):
        session = task["session"]
        for sent in (reward, reward, {"score": 0.5}):
            try:
                post(session["url"] + "/reward", sent, session["api_key"])
            except Exception as error:
                note(log, {"number": number, "calls": [], "refused": str(error)})


class Handler(BaseHTTPRequestHandler):
    log = Path()

    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(json.dumps(play(task, self.log, random.randrange(NUMBERS))).encode())

    def answer(self, content: bytes) -> None:
        try:
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


if __name__ == "__main__":
    Handler.log = Path(sys.argv[1])
    if len(sys.argv) > 3:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
    else:
        run_program(Path(sys.argv[1]), Path(sys.argv[2]))
