"""The engine on a device other than the CPU: the placement of its tensors, synchronisation, and
recorded steps.

CI has no GPU, so the tests use tensors on `meta`. Like a GPU's, they refuse to mix with CPU tensors
and to be read.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from learning.head import make_float32_logits
from services.engine.decoder import Decoder
from services.engine.engine import Engine
from services.engine.graphs import StepGraphs, recorder, round_up
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.model import Model
from services.engine.sampling import FIELDS, Inputs, sample
from tests.support.engines.engines import write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("device") / "model", seed=0)


def jobs() -> list[GenerationJob]:
    """Returns jobs of several lengths, some greedy or truncated, so that rows come and go."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.7},
        {"temperature": 0.6},
        {},
    ]
    return [
        GenerationJob(
            str(i),
            list(range(10, 13 + 9 * i)),
            SamplingParams(max_new_tokens=30 + 7 * i, sampling_seed=i, **each),
            n=3,
        )
        for i, each in enumerate(options)
    ]


def generated(model: Model, max_running: int) -> list[tuple[list[int], list[float]]]:
    engine = Engine(model, max_running=max_running)
    engine.start()
    try:
        chosen = jobs()
        engine.submit(chosen)
        return [
            (sequence.tokens, sequence.logprobs)
            for job in chosen
            for sequence in job.done.result(300)
        ]
    finally:
        engine.stop()


def again(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Records nothing; runs the step again on the same tensors."""
    return step


def refuse(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("record", [again, refuse])
def test_embedded_recorded_steps_generate_the_same(
    model_dir: Path, record: Callable[..., Callable[[], Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    """Covers padded rows and columns, a GPU's fixed cache, and a model that cannot be recorded."""
    plain = generated(Model(model_dir, 256), 12)
    model = Model(model_dir, 256)
    model.graphs = StepGraphs(model._step, record, model.device)
    model.reserve(12)
    with torch.inference_mode():
        model.cache.allocate(12, 256)
    recorded = generated(model, 12)
    assert (model.cache.rows, model.cache.columns) == (12, 256)
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(recorded, plain, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-5)
    records = model.graphs._records
    if record is refuse:
        assert not records
        assert caplog.text.count("run without CUDA graphs") == 1
    else:
        rows, columns, *_ = zip(*records, strict=True)
        assert set(rows) <= {1, 2, 3, 4, 6, 8, 12}
        assert set(columns) == {128}


class Cuda:
    """The parts of `torch.cuda` that recording needs, without a GPU: the current stream and each
    record's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: object = MagicMock()
        self.pools, self.records = itertools.count(), list[dict[str, Any]]()
        self.breaks = ""
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", MagicMock)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self.pools))

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _graph: object, **options: Any) -> Iterator[None]:
        """As in torch 2.13, an aborted recording does not restore the previous stream."""
        self.records.append(options)
        before, self.current = self.current, options["stream"]
        yield
        if self.breaks:
            raise RuntimeError(self.breaks)
        self.current = before


def test_embedded_records_share_memory_until_they_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses (`use_count > 0`) memory whose graphs are all gone, and another engine may
    replay concurrently."""
    cuda, step = Cuda(monkeypatch), MagicMock()
    main = cuda.current
    for _ in range(2):
        record = recorder()
        replays = [record(step), record(step)]
        assert [replay() for replay in replays] == [step.return_value] * 2
    assert [each["pool"] for each in cuda.records] == [0, 0, 1, 1]
    assert [each["stream"] for each in cuda.records] == [cuda.records[0]["stream"]] * 2 + [
        cuda.records[2]["stream"]
    ] * 2
    assert {each["capture_error_mode"] for each in cuda.records} == {"thread_local"}
    assert step.call_count == 8  # each step runs once before it is recorded
    assert cuda.current is main


def test_embedded_aborted_recording_restores_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    main, cuda.breaks = cuda.current, "operation failed due to a previous error during capture"
    with pytest.raises(RuntimeError, match="previous error"):
        recorder()(MagicMock())
    assert cuda.current is main


def test_embedded_sizes_of_records_are_few_and_waste_at_most_half() -> None:
    assert [round_up(n, 1, 256) for n in (1, 2, 3, 4, 5, 7, 9, 13, 180, 200)] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        192,
        256,
    ]
    assert [round_up(n, 128, 1000) for n in (1, 128, 129, 193, 257, 800)] == [
        128,
        128,
        192,
        256,
        384,
        1000,
    ]
    for number in range(1, 300):
        assert number <= round_up(number, 1, 300) <= max(2, 1.5 * number)


def on_another_device(model_dir: Path, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir), dtype=dtype
        ).eval()
    return Decoder(module, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("plain", "kept", "barred"), [(True, 0, 0), (False, 0, 0), (False, 4, 2)])
def test_embedded_a_step_stays_on_its_device_and_waits_for_nothing(
    model_dir: Path, dtype: torch.dtype, plain: bool, kept: int, barred: int
) -> None:
    decoder = on_another_device(model_dir, dtype)
    with torch.inference_mode():
        assert decoder.device.type == "meta"
        logits = decoder.prefill([[1, 2, 3], [4]], [0, 0, 1], 0)
        assert (logits.shape, logits.dtype, logits.device.type) == ((3, 282), torch.float32, "meta")
        decoder.cache.allocate(8, 256)
        assert {layer.keys.device.type for layer in decoder.cache.layers} == {"meta"}
        assert {(layer.keys.dtype, layer.keys.shape) for layer in decoder.cache.layers} == {
            (dtype, (8, 2, 256, 8))
        }
        assert decoder.cache.bytes_per_row(256) == 256 * 2 * 2 * 2 * 8 * dtype.itemsize
        state = torch.zeros(len(FIELDS) + barred, 3, dtype=torch.float64, device="meta")
        found = decoder._step(state, 64, plain, kept)
        assert (found.shape, found.device.type) == ((2 + (2 + kept if kept else 0), 3), "meta")
        assert sample(logits, state, plain, kept).device.type == "meta"
        decoder.cache.move([0], [2])
        decoder.cache.zero([1])
        decoder.cache.release()
        assert decoder.cache.layers[0].keys.shape == (
            8,
            2,
            256,
            8,
        )  # fixed, because graphs know its address


def test_embedded_logits_of_a_model_in_bfloat16_are_not_rounded(model_dir: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    hidden: list[Tensor] = []
    module.model.register_forward_hook(
        lambda _, __, output: hidden.append(output.last_hidden_state)
    )
    make_float32_logits(module)
    with torch.inference_mode():
        logits = Decoder(module, 256).prefill([[5, 6, 7]], [0], 0)
        wanted = hidden[0][0, -1:].float() @ module.lm_head.weight.float().t()
    torch.testing.assert_close(logits, wanted)
    assert (logits != logits.bfloat16().float()).any()


def test_embedded_a_step_reads_its_result_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is uploaded in one copy, and only the sampled tokens and log-probabilities are
    read."""
    reads: list[tuple[int, ...]] = []
    cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        reads.append(tuple(tensor.shape))
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    model = Model(model_dir, 256)
    model.reserve(4)
    with torch.inference_mode():
        model.prefill([[1, 2]], [0, 0], 0)
        found = model.decode(
            Inputs(
                np.array([[5.0, 6], [2, 2], [1, 1], [1, 1], [0.5, 0.1], [9, 9], [0, 0]]), plain=True
            )
        )
    assert found.shape == (2, 2)
    assert reads == [(2, 2)]  # the test above shows that `_step` reads nothing
