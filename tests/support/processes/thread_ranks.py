"""Ranks that are threads of this process, whose collective operations are torch's own for tests."""

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

_T = TypeVar("_T")
_LIMIT_S = 300.0


def run_in_threads(count: int, work: Callable[[int], _T]) -> list[_T]:
    """Returns what `work` returns on each rank. Raises AssertionError if it raises on one."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    found: dict[int, _T] = {}
    errors: list[str] = []
    store = dist.HashStore()

    def rank(number: int) -> None:
        try:
            dist.init_process_group("threaded", store=store, rank=number, world_size=count)
            found[number] = work(number)
        except BaseException as error:
            errors.append(traceback.format_exc())
            threaded: Any = multi_threaded_pg.ProcessLocalGroup
            threaded.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    isolate(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT_S)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        isolate(False)
    assert not errors, errors[0]
    return [found[number] for number in range(count)]
