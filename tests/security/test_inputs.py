"""Input from services, files and models that would do harm if it were trusted."""

import gzip
import json
import socket
import threading
from pathlib import Path

import httpx
import msgpack
import pytest
import torch
from fastapi import FastAPI, Response
from transformers import AutoModelForCausalLM

from common.clients.base import Client
from common.errors import ConfigError, InvalidInput, ServiceError
from common.process.security import check_certificate, tls
from common.process.topology import Topology
from common.settings.config import Config, load
from common.settings.rewards import JudgeReward
from common.settings.sections import RolloutSection
from common.wire.codec import unpack
from learning.liveness import _MAX_UNAUTHENTICATED, Liveness
from learning.loading import SafetensorsReader
from learning.ranks import Ranks
from services.engine.model import Model
from services.http.app import create_app
from services.reward.answers.equivalence import verdict
from tests.support.engines.engines import write_model
from tests.support.errors import raises
from tests.support.processes.certificates import Certificates

pytestmark = pytest.mark.integration

BOMBS = {
    "empty mappings": b"\x81\xa1a\xdd" + (10_000_000).to_bytes(4, "big") + b"\x80" * 10_000_000,
    "a list that says it is long": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a mapping that says it is long": b"\x81\xa1a\xdf\xff\xff\xff\xff",
    "lists of lists": b"\x81\xa1a\xdc\x00\x40"
    + (b"\xdd" + (200_000).to_bytes(4, "big") + b"\x90" * 200_000) * 64,
    "depth": b"\x81\xa1a" + b"\x91" * 100_000,
    "an extension": b"\x81\xa1a\xc7\x05\x01hello",
    "more than its bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_that_would_fill_the_memory_is_refused(name: str) -> None:
    with raises(InvalidInput, field="body"):
        unpack(BOMBS[name])


def test_a_body_of_many_items_is_taken() -> None:
    body = msgpack.packb({"groups": [{"completions": [{"spans": [[0, 0, 5]]}] * 64}] * 300})
    assert len(unpack(body)["groups"]) == 300


async def test_a_compressed_answer_is_refused_before_it_is_unpacked() -> None:
    app = create_app("thing")

    @app.get("/bomb")
    async def bomb() -> Response:
        return Response(b"no gzip at all, and nobody looks", headers={"content-encoding": "gzip"})

    async with Client("thing", "http://x", transport=httpx.ASGITransport(app)) as client:
        assert client.http.headers["accept-encoding"] == "identity"
        with raises(ServiceError, field="content-encoding"):
            await client.request("GET", "/bomb")


async def test_a_compressed_request_is_not_unpacked() -> None:
    app: FastAPI = create_app("thing")

    @app.post("/work")
    async def work(body: dict[str, int]) -> dict[str, int]:
        return body

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        answer = await http.post("/work", content=gzip.compress(b'{"a": 1}'), headers=headers)
    assert answer.status_code == 422


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch MARK')",
        "$__import__('os').system('touch MARK')$",
        r"\operatorname{__import__}(\text{os})",
        "(1).__class__.__base__.__subclasses__()",
        "eval(open('MARK','w'))",
        "\\boxed{exec(\"open('MARK', 'w')\")}",
        "2*(lambda: open('MARK','w'))()",
        "1 if open('MARK','w') else 2",
    ],
)
def test_an_answer_of_a_model_is_never_run(answer: str, tmp_path: Path) -> None:
    """math-verify passes only digits and operators to sympy, and so to Python's parser."""
    mark = tmp_path / "mark"
    verdict("42", answer.replace("MARK", str(mark)))
    assert not mark.exists()


def test_weights_in_a_pickle_are_not_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", seed=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    with raises(ConfigError, field="--model-path", value=str(path)):
        Model(path, 64)


def test_an_index_of_weights_names_files_of_its_own_directory(tmp_path: Path) -> None:
    outside, inside = write_model(tmp_path / "outside", seed=0), tmp_path / "inside"
    inside.mkdir()
    index = {"weight_map": {"a": "../outside/model.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (outside / "model.safetensors").is_file()
    with pytest.raises(FileNotFoundError):
        SafetensorsReader(inside)


@pytest.mark.parametrize("url", ["https://me:secret@host/v1", "http://token@host"])
def test_settings_have_no_credentials(url: str) -> None:
    with pytest.raises(ValueError, match="JUDGE_API_KEY") as caught:
        JudgeReward(url=url, model="m")
    assert "url contains credentials" in str(caught.value)
    words = ["--reward.functions", f'{{"name": "judge", "url": "{url}", "model": "m"}}']
    with pytest.raises(ConfigError, match="JUDGE_API_KEY") as told:
        load(words, {})
    assert url not in str(told.value)
    for word in (["--api-key", "x"], ["--api-key=x"], ["--admin-api-key=x"]):
        with pytest.raises(ValueError, match="API_TOKEN"):
            RolloutSection(engine_args=word)
    assert "token" not in {
        field
        for section in Config().model_dump().values()
        if isinstance(section, dict)
        for field in section
    }


@pytest.mark.integration
def test_certificates_that_cannot_be_used_are_named(
    certificates: Certificates, other_certificates: Certificates
) -> None:
    env = certificates.env()
    assert tls({}).scheme == "http"
    assert tls(env).scheme == "https"
    assert tls({"TLS_CA": env["TLS_CA"]}).scheme == "http"
    with raises(ConfigError, field="TLS_KEY"):
        tls({"TLS_CERT": env["TLS_CERT"]})
    with raises(ConfigError, field="TLS_CA", value="/absent.pem"):
        tls(env | {"TLS_CA": "/absent.pem"})
    with raises(ConfigError, field="TLS_CERT, TLS_KEY"):
        check_certificate(tls(env | {"TLS_KEY": str(other_certificates.key)}))


@pytest.mark.integration
def test_urls_follow_the_certificates(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Topology(group="g", local_hosts={})
    assert place.url("reward-server", 8002) == "http://reward-server-0.g:8002"
    for name, value in certificates.env().items():
        monkeypatch.setenv(name, value)
    assert place.url("reward-server", 8002) == "https://reward-server-0.g:8002"


@pytest.mark.integration
def test_strangers_cannot_join_the_liveness_watch_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's side runs in a thread of this process; believing a lie would end the process."""
    told: list[str] = []
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(Ranks, "broadcast", lambda _self, value: told.extend(map(str, value)))
    with Liveness(
        Ranks(world_size=2, device_kind="cpu"), Topology(), 600.0, stuck_after_s=600.0
    ) as watch:
        place, token = ("127.0.0.1", int(told[0])), told[1]
        liar = socket.create_connection(place)
        liar.sendall(b'hello wrong-token 1\n{"word": "gone", "rank": 1, "how": "failed"}\n')
        talker = socket.create_connection(place)
        talker.sendall(b"x" * 400_000)
        assert ended(liar)
        assert ended(talker)
        silent = [socket.create_connection(place) for _ in range(3 * _MAX_UNAUTHENTICATED)]
        assert all(ended(sock) for sock in silent[: 2 * _MAX_UNAUTHENTICATED])
        assert watch._gone == {}
        known = socket.create_connection(place)
        gone = {"word": "gone", "rank": 1, "how": "done"}
        known.sendall(f"hello {token} 1\n{json.dumps(gone)}\n".encode())
        # Whoever has the token is let in, and rank 0 passes on what it says.
        with known.makefile() as lines:
            assert gone.items() <= json.loads(lines.readline()).items()
        for sock in (liar, talker, known, *silent):
            sock.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "liveness"]


def ended(sock: socket.socket) -> bool:
    """Returns whether the other end closes the connection."""
    sock.settimeout(60)
    try:
        return sock.recv(1) == b""
    except OSError:
        return True
