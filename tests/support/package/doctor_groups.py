"""Small job groups and HTTP servers for the tests of the doctor."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jobgroup.doctor.plan import Plan, make

LARGE = {  # Llama 3 70B
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def write_group(folder: Path, tasks: Mapping[str, str], env: Mapping[str, object]) -> Path:
    """Writes a job group; `tasks` maps names to extra lines of their documents, and `env` applies
    to every task."""
    envs = json.dumps(
        {key: str(value) for key, value in {"STATE_DIR": folder / "state", **env}.items()}
    )
    documents = [f"name: {name}\nrun: 'true'\nenvs: {envs}\n{more}" for name, more in tasks.items()]
    path = folder / "group.yaml"
    path.write_text("---\n".join(["name: small\nexecution: parallel\n", *documents]))
    return path


def plan_of(
    folder: Path,
    tasks: Mapping[str, str],
    around: Mapping[str, str] | None = None,
    task: str | None = None,
    env: Mapping[str, object] | None = None,
) -> Plan:
    """Returns the plan for such a group in the environment `around`; `env` goes into the YAML."""
    return make(write_group(folder, tasks, env or {}), {}, around or {}, task=task)


def write_model(folder: Path, config: Mapping[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serving(answers: Mapping[str, Any], *, status: int = 200, token: str = "") -> Iterator[int]:
    """Serves JSON by path to GET and HEAD on 127.0.0.1, and 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path, {})).encode()
            code = status if self.path in answers else 404
            if token and self.headers.get("authorization") != f"Bearer {token}":
                code = 401
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", '"1"')  # the hub's library wants these two
            self.send_header("x-repo-commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
