"""An agent that gives up on a call and takes that for a failure of the model: its reward is 0.

It has had one answer before. The task's columns say how it gives up (`how`), what it asks then (`then`), and how it
gives its reward (`reward`); files in `folder` tell how far it is, and it goes on when others are there.
"""

import http.client
import json
import os
import socket
import struct
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any


def connect(url: str) -> http.client.HTTPConnection:
    address = urllib.parse.urlsplit(url)
    assert address.hostname
    return http.client.HTTPConnection(address.hostname, address.port)


def send(connection: http.client.HTTPConnection, url: str, body: Any, part: float = 1.0) -> None:
    """Sends a request, or so much of its body."""
    content = json.dumps(body).encode()
    connection.putrequest("POST", urllib.parse.urlsplit(url).path)
    connection.putheader("content-type", "application/json")
    connection.putheader("authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    connection.putheader("content-length", str(len(content)))
    connection.endheaders(content[: int(part * len(content))])


def ask(text: str, connection: http.client.HTTPConnection | None = None) -> int:
    """Returns the status of a call whose answer is read to its end; 0 if there is none."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    connection = connection or connect(url)
    try:
        send(connection, url, {"messages": [{"role": "user", "content": text}]})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0


def leave(how: str) -> None:
    """Sends a call and leaves before it is answered."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    connection = connect(url)
    send(
        connection,
        url,
        {"messages": [{"role": "user", "content": "hard"}]},
        0.5 if how == "half" else 1.0,
    )
    if how == "resets":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def main(columns: dict[str, Any]) -> None:
    folder = Path(columns["folder"])

    def wait_for(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.01)

    assert ask("easy") == 200
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "ready").touch()
    wait_for("busy")
    how = columns["how"]
    if how == "asks":
        assert ask("hard") in (0, 500, 503)
    else:
        leave(how)
    if columns["reward"] == "file":
        Path(os.environ["EPISODE_REWARD_FILE"]).write_text("0.0")
        return
    (folder / "left").touch()
    wait_for("free")

    asked = {"same": "hard", "other": "another"}.get(columns["then"])
    if asked is not None:
        assert ask(asked) == 200
    url = os.environ["EPISODE_URL"] + "/reward"
    connection = connect(url)
    send(connection, url, 0.0)
    assert connection.getresponse().status == 200


if __name__ == "__main__":
    main(json.load(sys.stdin)["columns"])
