"""A process of its own reads the engines' answers; the event loop only passes them on."""

import os
import pathlib
import signal
import subprocess
import sys
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
from common.process.storage import StorageFailed
from common.wire.schemas import Completion
from tests.support.processes.processes import alive
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration


@pytest.fixture
def readers() -> Iterator[ProcessPoolExecutor]:
    with helper_processes(1) as found:
        yield found


def files_in(directory: pathlib.Path) -> list[pathlib.Path]:
    return list(directory.iterdir())


def answer_of(ids: list[int], **changed: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
        "weight_version": "3",
        **changed,
    }
    return {"text": "the text", "output_ids": ids, "meta_info": meta}


async def generated(
    readers: ProcessPoolExecutor, directory: pathlib.Path | None = None, **changed: Any
) -> list[Completion]:
    answer = answer_of(list(range(50)), **changed)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=[answer, answer]))
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.readers = readers
        client.directory = directory
        return await client.generate(
            [1], n=2, max_new_tokens=50, temperature=1.0, stop_token_ids=[]
        )


@pytest.mark.parametrize("in_files", [False, True])
async def test_answers_are_read_there(
    readers: ProcessPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    in_files: bool,
) -> None:
    monkeypatch.setattr(rollout, "completion_from_answer", None)  # of this process
    for completion in await generated(readers, tmp_path if in_files else None):
        assert completion.token_ids.tolist() == list(range(50))
        np.testing.assert_array_equal(completion.logprobs, -0.5 * np.arange(50, dtype=np.float32))
        assert (completion.text, completion.weight_versions) == ("the text", [(3, 0, 50)])
    assert files_in(tmp_path) == [], "answers are removed when they are read"


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
    until(lambda: not alive(reader), "the reader ends")


class BreaksOnce(httpx.AsyncByteStream):
    """A body whose connection breaks in the middle, the first time."""

    def __init__(self, body: bytes, attempts: list[int]) -> None:
        self._body = body
        self._attempts = attempts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._attempts.append(1)
        half = len(self._body) // 2
        yield self._body[:half]
        if len(self._attempts) == 1:
            raise httpx.ReadError("the connection broke")
        yield self._body[half:]


async def test_a_body_of_which_half_arrived_is_received_again_and_leaves_no_file(
    readers: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    body = orjson.dumps(answer_of([1, 2]))
    attempts: list[int] = []
    transport = httpx.MockTransport(
        lambda _: httpx.Response(200, stream=BreaksOnce(body, attempts))
    )
    async with RolloutClient("router", "http://router", transport=transport) as client:
        client.readers = readers
        client.directory = tmp_path / "answers"
        asked = client.generate([1], n=1, max_new_tokens=2, temperature=1.0, stop_token_ids=[])
        (completion,) = await asked
    assert completion.token_ids.tolist() == [1, 2]
    assert len(attempts) == 2
    assert files_in(tmp_path / "answers") == []


async def test_a_full_disk_fails_the_request_by_name(
    readers: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "answers").write_text("no directory")
    with pytest.raises(StorageFailed) as error:
        await generated(readers, tmp_path / "answers")
    assert error.value.field == "state_dir"
