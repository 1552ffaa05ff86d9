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
Step = Callable[..., Tensor]
"""(state, columns, plain, kept=, routed=) -> result, all on the device."""
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a function, and returns a function that replays it on the same tensors."""
_COLUMNS_UNIT = 128


class StepGraphs:
    """Replays recorded steps. Rows and columns are rounded up to keep the number of recordings
    small.

    Padding rows compute on free rows of the cache, at position 0. When a step cannot be recorded (a
    model that synchronises with the host), no further step is recorded, and all steps run directly.
    """

    def __init__(self, step: Step, record: Record, device: torch.device) -> None:
        self._step = step
        self._record = record
        self._device = device
        self._records: dict[tuple[int, ...], tuple[Tensor, Callable[[], Tensor]]] = {}
        self._works = True

    def __call__(self, inputs: Inputs, columns: int, capacity: tuple[int, int]) -> Tensor:
        """Returns the step's result for at least the rows of `inputs`; `capacity` is the cache's
        (rows, columns).
        """
        rows = inputs.state.shape[1]
        padded_rows = round_up(rows, 1, capacity[0])
        padded_columns = round_up(columns, _COLUMNS_UNIT, capacity[1])
        padded_kept = round_up(inputs.kept, 1, MAX_KEPT) if inputs.kept else 0
        idle = np.pad(IDLE, ((0, len(inputs.state) - len(IDLE)), (0, 0)), constant_values=-1)
        padded = np.repeat(idle, padded_rows, 1)
        padded[:, :rows] = inputs.state
        state = torch.from_numpy(padded)
        plain = inputs.plain
        routed = inputs.routed

        def step(on_device: Tensor) -> Tensor:
            return self._step(on_device, padded_columns, plain, kept=padded_kept, routed=routed)

        key = (padded_rows, padded_columns, plain, padded_kept, routed, len(padded))
        if key not in self._records and self._works:
            self._make(key, state, step)
        if key not in self._records:
            return step(state.to(self._device))
        buffer, replay = self._records[key]
        buffer.copy_(state)
        return replay()

    def _make(self, key: tuple[int, ...], state: Tensor, step: Callable[[Tensor], Tensor]) -> None:
        """Records `step` on a buffer that begins as `state`."""
        buffer = torch.empty_like(state, device=self._device).copy_(state)
        try:
            self._records[key] = (buffer, self._record(lambda: step(buffer)))
        except RuntimeError as error:
            # What one shape does, such as reading a number back, all do: no other is tried.
            self._works = False
            log.warning(
                "decode steps run without CUDA graphs, which this model does not allow: %s", error
            )


def round_up(number: int, unit: int, maximum: int) -> int:
    """Returns the least of unit × 1, 2, 3, 4, 6, 8, 12, … that is not below `number`, at most
    `maximum`.
    """
    size = unit
    while size < number:
        size *= 2
    between = max(unit, size * 3 // 4)
    return min(maximum, between if between >= number else size)


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
    current = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    # The outer context restores the stream even after a failed recording, which torch does not.
    with torch.cuda.stream(stream):
        step()
        # thread_local: other threads may use the GPU.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            found = step()
    current.wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay
