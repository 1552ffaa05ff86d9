"""A process of its own reads the engines' answers; the event loop only passes them on."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from common.clients import rollout
from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ServiceLost
from common.process.helpers import helper_processes
from common.wire.schemas import Completion

pytestmark = pytest.mark.integration


@pytest.fixture
def readers() -> Iterator[ProcessPoolExecutor]:
    with helper_processes(1) as found:
        yield found


async def generated(readers: ProcessPoolExecutor, **changed: Any) -> list[Completion]:
    ids = list(range(50))
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
        "weight_version": "3",
        **changed,
    }
    answer = {"text": "the text", "output_ids": ids, "meta_info": meta}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=[answer, answer]))
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.readers = readers
        return await client.generate(
            [1], n=2, max_new_tokens=50, temperature=1.0, stop_token_ids=[]
        )


async def test_answers_are_read_there(
    readers: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "completion_from_answer", None)  # of this process
    for completion in await generated(readers):
        assert completion.token_ids.tolist() == list(range(50))
        np.testing.assert_array_equal(completion.logprobs, -0.5 * np.arange(50, dtype=np.float32))
        assert (completion.text, completion.weight_versions) == ("the text", [(3, 0, 50)])


async def test_an_answer_that_cannot_be_trained_on_fails_here(
    readers: ProcessPoolExecutor,
) -> None:
    with pytest.raises(GenerationFailed) as error:
        await generated(readers, finish_reason={"type": "abort"})
    assert (error.value.field, error.value.status) == ("/generate", 502)


async def test_a_reader_that_is_killed_ends_the_run(readers: ProcessPoolExecutor) -> None:
    os.kill(readers.submit(os.getpid).result(), signal.SIGKILL)
    with pytest.raises(ServiceLost) as error:
        await generated(readers)
    assert error.value.remedy


def test_readers_end_with_a_process_that_is_killed() -> None:
    program = (
        "import os, time; from common.process.helpers import helper_processes\n"
        "if __name__ == '__main__':\n"
        "    print(helper_processes(1).submit(os.getpid).result(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = int(process.stdout.readline())
        process.kill()
    limit = time.monotonic() + 30
    while pathlib.Path(f"/proc/{reader}/stat").exists() and time.monotonic() < limit:
        with pathlib.Path(f"/proc/{reader}/stat").open() as file:
            if ") Z " in file.read():
                return
        time.sleep(0.05)
    assert not pathlib.Path(f"/proc/{reader}").exists()


class Counted(httpx.AsyncByteStream):
    """A body that tells how many are received at once."""

    def __init__(self, body: bytes, at_once: list[int]) -> None:
        self._body = body
        self._at_once = at_once

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._at_once[0] += 1
        self._at_once[1] = max(self._at_once)
        await asyncio.sleep(0.01)
        self._at_once[0] -= 1
        yield self._body


@pytest.mark.parametrize(("few", "most"), [(True, 2), (False, 8)])
async def test_few_large_answers_are_received_at_once(few: bool, most: int) -> None:
    ids = [1, 2]
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_version": "3",
    }
    body = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
    at_once = [0, 0]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Counted(body, at_once)))
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.receives_few = few
        asked = [
            client.generate([1], n=1, max_new_tokens=2, temperature=1.0, stop_token_ids=[])
            for _ in range(8)
        ]
        assert len(await asyncio.gather(*asked)) == 8
    assert at_once[1] == most
