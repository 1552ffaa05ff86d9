"""CUDA graphs of the decode step: a model of many small kernels costs one launch instead of hundreds."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.sampling import IDLE, MAX_KEPT, Inputs

log = logging.getLogger(__name__)
Step = Callable[[Tensor, int, bool, int], Tensor]
"""(state, columns, plain, kept) -> result, all on the device."""
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records what a function does, and returns a function that does it again, on the same tensors."""
_LEAST_COLUMNS = 128


class StepGraphs:
    """Replays recorded steps. Rows and columns are rounded up, so that there are few records.

    Rows beyond those that run compute on free rows of the cache, at position 0. When a step cannot be recorded (a model that
    waits for its own numbers), no further one is, and steps run as they are.
    """

    def __init__(self, step: Step, record: Record, device: torch.device) -> None:
        self._step, self._record, self._device = step, record, device
        self._records: dict[tuple[int, ...], tuple[Tensor, Callable[[], Tensor]]] = {}
        self._works = True

    def __call__(self, inputs: Inputs, columns: int, capacity: tuple[int, int]) -> Tensor:
        """Returns the result of the step for at least the rows of `inputs`; `capacity` are the rows and columns there are."""
        rows = inputs.state.shape[1]
        padded_rows, padded_columns = round_up(rows, 1, capacity[0]), round_up(columns, _LEAST_COLUMNS, capacity[1])
        idle = np.pad(IDLE, ((0, len(inputs.state) - len(IDLE)), (0, 0)), constant_values=-1)
        padded = np.repeat(idle, padded_rows, 1)
        padded[:, :rows] = inputs.state
        how = (padded_columns, inputs.plain, round_up(inputs.kept, 1, MAX_KEPT) if inputs.kept else 0)
        state, key = torch.from_numpy(padded), (padded_rows, *how, len(padded))
        if key not in self._records and self._works:
            self._make(key, state, how)
        if key not in self._records:
            return self._step(state.to(self._device), *how)
        buffer, replay = self._records[key]
        buffer.copy_(state)
        return replay()

    def _make(self, key: tuple[int, ...], state: Tensor, how: tuple[int, bool, int]) -> None:
        buffer = torch.empty_like(state, device=self._device).copy_(state)
        try:
            self._records[key] = buffer, self._record(lambda: self._step(buffer, *how))
        except RuntimeError as error:
            self._works = False
            log.warning("decode steps run without CUDA graphs, which this model does not allow: %s", error)


def round_up(number: int, least: int, most: int) -> int:
    """Returns the next of least × 1, 2, 3, 4, 6, 8, 12, …, at most `most`."""
    size = least
    while size < number:
        size *= 2
    between = max(least, size * 3 // 4)
    return min(most, between if between >= number else size)


def recorder() -> Record:
    """Returns what records steps as CUDA graphs, on one stream and in one memory: a result is read before the next graph runs.

    Made anew for every set of graphs: torch refuses memory whose graphs are all gone, and two engines of one process must not
    share it.
    """
    return partial(capture, torch.cuda.Stream(), torch.cuda.graph_pool_handle())


def capture(stream: Any, pool: Any, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Records a step as a CUDA graph, after running it once: kernels are chosen and loaded by the first run."""
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # which is left also where torch does not leave its own, after a record that broke off
        step()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # others may use the GPU
            found = step()
    current.wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay
