"""Copies through two buffers are exact for any size and in order, and no failed copy goes
unnoticed."""

from functools import partial

import pytest
import torch

from learning.staging import Staging, on_host

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_every_tensor_arrives_whatever_the_size_of_the_buffers(size: int) -> None:
    torch.manual_seed(size)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = [
        torch.randint(0, 2, shape).to(kind)
        for shape in ((), (0,), (5,), (33, 3), (2, 0, 4))
        for kind in kinds
    ]
    tensors += [
        torch.randn(40, 30).t(),
        torch.randn(9, 9)[::2],
        torch.nn.Parameter(torch.randn(6, 2)),
    ]
    staging = Staging(CPU, size)
    down = [staging.to_host(tensor) for tensor in tensors]
    staging.wait()
    for found, tensor in zip(down, tensors, strict=True):
        assert (found.dtype, found.shape, found.is_contiguous(), found.requires_grad) == (
            tensor.dtype,
            tensor.shape,
            True,
            False,
        )
        assert torch.equal(found, tensor.detach())
        assert not tensor.numel() or found.data_ptr() != tensor.data_ptr()
        up = staging.to_device(found)
        assert torch.equal(up, found)
        assert not up.numel() or up.data_ptr() != found.data_ptr()


def test_work_runs_after_the_copies_before_it() -> None:
    staging, target, seen = Staging(CPU, 16), torch.zeros(4, 100), list[bool]()

    def look(row: int) -> None:
        seen.append(bool((target[row] == row + 1).all()))

    for row in range(4):
        staging.to_host(torch.full((100,), row + 1.0), target[row])
        staging.then(partial(look, row))
    staging.wait()
    assert seen == [True] * 4


def test_an_error_is_raised_and_ends_the_work_after_it() -> None:
    staging, seen = Staging(CPU), list[int]()

    def fail() -> None:
        raise OSError("no page")

    staging.then(fail)
    staging.then(lambda: seen.append(1))
    with pytest.raises(OSError, match="no page"):
        staging.wait()
    assert seen == []


def test_two_buffers_serve_all_copies() -> None:
    staging = Staging(CPU, 8)
    for _ in range(20):
        staging.to_host(torch.randn(50))
    staging.to_device(torch.randn(50))
    staging.wait()
    assert len({buffer.data_ptr() for buffer, _ in staging._buffers}) == len(staging._buffers) == 2


def test_contiguous_tensors_in_host_memory_are_not_copied() -> None:
    there, turned = torch.randn(3, 4), torch.randn(3, 4).t()
    found = on_host([("there", there), ("turned", turned)])
    assert found["there"].data_ptr() == there.data_ptr()
    assert found["turned"].is_contiguous()
    assert torch.equal(found["turned"], turned)
