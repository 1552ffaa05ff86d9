"""An agent that uses only the standard library; the task's prompt names its behaviour."""

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, body: Any, key: str = "", timeout: float | None = None) -> tuple[int, Any]:
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}",
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(content: str, key: str = "", timeout: float | None = None) -> tuple[int, Any]:
    body = {"model": "any", "messages": [{"role": "user", "content": content}]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key, timeout=timeout)


def begin_call(content: str, streams: bool = False) -> http.client.HTTPConnection:
    """Sends a call and returns its connection."""
    address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    assert address.hostname
    body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": content}]}
    if streams:
        body["stream"] = True
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.request("POST", f"{address.path}/chat/completions", json.dumps(body), headers)
    return connection


def leave(content: str, streams: bool = False) -> None:
    """Makes a call and leaves when its answer has come, or after the begin of its stream."""
    connection = begin_call(content, streams)
    select.select([connection.sock], [], [])
    if streams:
        connection.sock.recv(100)
    connection.close()


def write(reward: Any) -> None:
    text = reward if isinstance(reward, str) else json.dumps(reward)
    Path(os.environ["EPISODE_REWARD_FILE"]).write_text(text)


def note(pid: int, task: dict[str, Any]) -> None:
    with Path(task["columns"]["pids"]).open("a") as file:
        file.write(f"{pid}\n")


def main(task: dict[str, Any]) -> None:
    mode, call = task["prompt"], os.environ["EPISODE_URL"] + "/reward"
    if mode == "forged":
        print(ask("x", "forged"))
        sys.exit(1)
    if mode == "swallows":  # it makes a reward of any error
        ask("x")
        write(0.0)
        return
    if mode == "gives up":
        begun = Path(task["columns"]["begun"])
        left = Path(task["columns"]["left"])
        begun.unlink(missing_ok=True)  # of an earlier try
        left.unlink(missing_ok=True)
        connection = begin_call("x")
        while not begun.exists():
            time.sleep(0.01)
        connection.close()
        left.touch()
        post(call, 0.0)
        return
    if mode.startswith("leaves its"):
        leave("x", streams=mode == "leaves its stream")
        write(0.0)
        return
    if mode == "leaves and asks again":
        mode = "asks again"
        leave(mode)
    if mode == "two answers":
        body = {"n": 2, "messages": [{"role": "user", "content": "x"}]}
        assert post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)[0] == 422
    if mode == "killed with a default":
        write(0.0)
    status, answer = ask(mode if mode != "large" else "x" * 10_000_000)
    if status != 200:
        print(status, answer)
        sys.exit(1)
    said = answer["choices"][0]["message"]["content"]
    right = float(said == task["ground_truth"])
    if mode == "file":
        write({"right": right, "short": 0.5})
    elif mode in ("number", "two answers", "asks again"):
        write(right)
    elif mode == "call":
        assert post(call, right) == (200, {"status": "graded"})
        assert post(call, right)[0] == 200, "a retry"
        print(post(call, 0.25), ask("late"))
        write(7)
    elif mode == "bad call":
        print(post(call, "much"))
        write(-1.0)
    elif mode == "lingers":
        note(os.getpid(), task)
        post(call, right)
        time.sleep(1000)
    elif mode == "crash":
        raise RuntimeError("out of order")
    elif mode in ("signal", "killed with a default"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode in ("no JSON", "NaN", "[]", "{}", "null", '""'):
        write(mode)
    elif mode == "chatty":
        sys.stdout.write("x" * 10_000_000)
        write(right)
    elif mode == "limits":
        while True:
            status, answer = ask(f"{time.monotonic_ns()}")
            assert status == 200, answer
    elif mode == "killed with a reward":
        write(right)
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "killed while it writes":
        write('{"right": ')
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "leaves":
        note(subprocess.Popen(["sleep", "1000"]).pid, task)
        note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, task)
        write(right)
    elif mode == "escapes":
        # A daemon that nothing ties to its episode: no parent, no session, no variables.
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(os.getpid(), task)
                os.closerange(0, 3)
                os.execve("/bin/sleep", ["sleep", "1000"], {})  # noqa: S606
            os._exit(0)
        os.wait()
        while not Path(task["columns"]["pids"]).exists():
            time.sleep(0.01)
        write(right)
    elif mode == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(os.getpid(), task)
        note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, task)
        time.sleep(1000)
    elif mode == "variables":
        write(
            {"secrets": len([name for name in os.environ if "TOKEN" in name or "SECRET" in name])}
        )
        print(sorted(os.environ))


if __name__ == "__main__":
    main(json.load(sys.stdin))
