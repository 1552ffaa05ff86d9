"""The real process: the errors that stop its start, and its state after a kill at any moment."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.clients.base import wait_healthy
from common.clients.data import DataClient
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.integration

TINY = 8192
"""Problems of the built-in training split."""


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RLHF_", "HF_", "SKYPILOT_"))
    }
    return kept | more


def command(state: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.data", "--state_dir", str(state), *arguments]


def start_fails(state: Path, *arguments: str, **env: str) -> str:
    """Starts the process, expects status 2 and returns its error output."""
    done = subprocess.run(
        command(state, *arguments),
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "remedy:" in done.stderr
    return done.stderr


@contextmanager
def server(state: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(state, "--data.source", "tiny", "--data.port", str(port), *arguments),
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(400)


def client_of(port: int) -> DataClient:
    return DataClient("data-server", f"http://127.0.0.1:{port}", deadline_s=400)


def test_trap_failed_data_set_stops_the_start(tmp_path: Path) -> None:
    """The ancestor served five toy sums if its data set did not load."""
    (tmp_path / "train.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?"}\n', "utf-8"
    )
    (tmp_path / "test.jsonl").write_text('{"question": "3 + 3?", "answer": "6"}\n', "utf-8")
    text = start_fails(tmp_path / "state", "--data.source", str(tmp_path))
    assert "train.jsonl, line 2: there is no column 'answer'" in text
    assert "no such file or directory" in start_fails(
        tmp_path / "state", "--data.source", str(tmp_path / "absent")
    )
    assert not (tmp_path / "state" / "data").exists()


def test_an_unreachable_hub_stops_the_start_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    text = start_fails(
        tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}", HF_HOME=str(tmp_path / "hf")
    )
    assert time.monotonic() - begin < 80  # the library alone retries for longer
    assert "openai/gsm8k cannot be loaded" in text
    for word in ("HF_HUB_OFFLINE", "HF_HOME", "data.source PATH"):
        assert word in text


def test_offline_without_a_cached_copy_stops_the_start(tmp_path: Path) -> None:
    text = start_fails(tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert "openai/gsm8k cannot be loaded" in text
    assert "HF_HOME" in text


async def test_restart_keeps_the_cursor_and_refuses_another_seed(tmp_path: Path) -> None:
    port = free_port()
    async with client_of(port) as client:
        with server(tmp_path, port) as process:
            first = await client.prompts(200, "first")
            process.send_signal(signal.SIGTERM)
            assert process.wait(400) == 0
        with server(tmp_path, port):
            second = await client.prompts(200, "second")
            assert await client.prompts(200, "first") == first
    assert (first.position, second.position) == (0, 200)
    assert not {prompt.id for prompt in first.prompts} & {prompt.id for prompt in second.prompts}
    text = start_fails(tmp_path, "--data.source", "tiny", "--data.port", str(port), "--seed", "1")
    assert "belongs to seed 0, not 1" in text


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        text = start_fails(tmp_path, "--data.source", "tiny", "--data.port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in text


async def pull(client: DataClient, name: str, received: dict[int, str]) -> None:
    """Takes batches until the first epoch is over; records the prompt of every position."""
    for number in range(10_000):
        batch = await client.prompts(64, f"{name}-{number}")
        for offset, prompt in enumerate(batch.prompts):
            assert batch.position + offset not in received, "a position was handed out twice"
            received[batch.position + offset] = prompt.id
        if batch.position >= TINY:
            return


async def test_every_prompt_once_an_epoch_through_kills_and_concurrent_clients(
    tmp_path: Path,
) -> None:
    port, received, kills = free_port(), dict[int, str](), 0
    async with client_of(port) as client:
        pullers = asyncio.gather(*(pull(client, f"client{n}", received) for n in range(4)))
        for part in range(1, 3):
            with server(tmp_path, port) as process:
                while len(received) < part * TINY // 3 and not pullers.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                assert not pullers.done()
                process.send_signal(signal.SIGKILL)
                kills += 1
        with server(tmp_path, port):
            await wait_healthy([client], 400)
            await asyncio.wait_for(pullers, 400)
    assert kills == 2
    assert sorted(received) == list(range(len(received)))
    once = Counter(prompt for position, prompt in received.items() if position < TINY)
    assert once == Counter(f"tiny-train-{n}" for n in range(TINY))


async def curriculum_steps(client: DataClient, first: int, last: int) -> list[list[str]]:
    """Draws batches of 8 and reports their pass rates; the last letter of an id is its
    difficulty."""
    batches = []
    for step in range(first, last):
        batch = [prompt.id for prompt in (await client.prompts(8, f"draw-{step}")).prompts]
        await client.report_pass_rates(
            batch, [int(name[-1]) / 9 for name in batch], f"report-{step}"
        )
        batches.append(batch)
    return batches


@pytest.mark.slow
async def test_a_curriculum_goes_on_through_kills_as_if_there_were_none(tmp_path: Path) -> None:
    settings = ("--data.curriculum", "difficulty", "--data.num_samples", "24")
    port = free_port()
    async with client_of(port) as client:
        with server(tmp_path / "whole", port, *settings):
            await wait_healthy([client], 400)
            whole = await curriculum_steps(client, 0, 12)
        cut: list[list[str]] = []
        for part in range(3):
            with server(tmp_path / "cut", port, *settings) as process:
                await wait_healthy([client], 400)
                repeats = await curriculum_steps(
                    client, max(0, 4 * part - 1), 4 * part
                )  # after lost answers
                assert repeats == cut[-1:]
                cut += await curriculum_steps(client, 4 * part, 4 * part + 4)
                process.send_signal(signal.SIGKILL)
                process.wait(400)
    assert cut == whole
    assert sorted(name for batch in whole[:3] for name in batch) == sorted(
        {name for batch in whole for name in batch}
    )


def test_starting_needs_no_heavy_library() -> None:
    script = "import sys, services.data.__main__; print([x for x in ('torch', 'datasets', 'pyarrow') if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert done.stdout.strip() == "[]"
