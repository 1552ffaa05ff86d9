"""Errors of a process without memory are recognised: each is really raised here."""

import mmap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from learning.out_of_memory import exhausted_memory


def _thread() -> None:
    before = threading.stack_size(1 << 46)  # more than an address has bits for
    try:
        threading.Thread(target=int).start()
    finally:
        threading.stack_size(before)


def _bytes() -> None:
    bytearray(1 << 60)


def _tensor() -> None:
    torch.empty(1 << 46)


def _map() -> None:
    mmap.mmap(-1, 1 << 60)


@pytest.mark.parametrize("work", [_thread, _bytes, _tensor, _map])
def test_memory_that_the_system_refuses(work: Callable[[], None]) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as caught:
        work()
    assert exhausted_memory(caught.value) == "memory"


def test_memory_of_a_gpu() -> None:
    assert exhausted_memory(torch.OutOfMemoryError("CUDA out of memory.")) == "GPU memory"


def _errors() -> Iterator[Exception]:
    for work in (
        lambda: open("/no/such/file"),  # noqa: SIM115, PTH123
        lambda: torch.ones(2) + torch.ones(3),
        lambda: [][0],
    ):
        try:
            work()
        except Exception as error:
            yield error


def test_other_errors_are_not_about_memory() -> None:
    errors = list(_errors())
    assert len(errors) == 3
    assert [exhausted_memory(error) for error in errors] == ["", "", ""]
