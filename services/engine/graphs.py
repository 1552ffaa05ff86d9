"""CUDA graphs of the decode step: one launch instead of hundreds of small kernels."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.settings.sections import MAX_KEPT
from services.engine.sampling import IDLE, Inputs

log = logging.getLogger(__name__)
Step = Callable[[Tensor, int, bool, int], Tensor]
"""(state, columns, plain, kept) -> result, all on the device."""
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a function, and returns a function that replays it on the same tensors."""
_LEAST_COLUMNS = 128


class StepGraphs:
    """Replays recorded steps. Rows and columns are rounded up to keep the number of recordings
    small.

    Padding rows compute on free rows of the cache, at position 0. When a step cannot be recorded (a
    model that synchronises with the host), no further step is recorded, and all steps run directly.
    """

    def __init__(self, step: Step, record: Record, device: torch.device) -> None:
        self._step, self._record, self._device = step, record, device
        self._records: dict[tuple[int, ...], tuple[Tensor, Callable[[], Tensor]]] = {}
        self._works = True

    def __call__(self, inputs: Inputs, columns: int, capacity: tuple[int, int]) -> Tensor:
        """Returns the step's result for at least the rows of `inputs`; `capacity` is the cache's
        (rows, columns).
        """
        rows = inputs.state.shape[1]
        padded_rows, padded_columns = (
            round_up(rows, 1, capacity[0]),
            round_up(columns, _LEAST_COLUMNS, capacity[1]),
        )
        idle = np.pad(IDLE, ((0, len(inputs.state) - len(IDLE)), (0, 0)), constant_values=-1)
        padded = np.repeat(idle, padded_rows, 1)
        padded[:, :rows] = inputs.state
        how = (
            padded_columns,
            inputs.plain,
            round_up(inputs.kept, 1, MAX_KEPT) if inputs.kept else 0,
        )
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
            log.warning(
                "decode steps run without CUDA graphs, which this model does not allow: %s", error
            )


def round_up(number: int, least: int, most: int) -> int:
    """Returns the next of least × 1, 2, 3, 4, 6, 8, 12, …, at most `most`."""
    size = least
    while size < number:
        size *= 2
    between = max(least, size * 3 // 4)
    return min(most, between if between >= number else size)


def recorder() -> Record:
    """Returns a recorder of CUDA graphs that share one stream and one memory pool.

    Sharing works because a result is read before the next graph runs. Every set of graphs needs a
    new recorder: torch refuses a pool whose graphs are all gone, and two engines in one process
    must not share a pool.
    """
    return partial(capture, torch.cuda.Stream(), torch.cuda.graph_pool_handle())


def capture(stream: Any, pool: Any, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Records a step as a CUDA graph, after running it once so that kernels are chosen and
    loaded.
    """
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    with torch.cuda.stream(
        stream
    ):  # restores the stream even after a failed recording, which torch does not
        step()
        with torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):  # others may use the GPU
            found = step()
    current.wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay
