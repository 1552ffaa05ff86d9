"""One checksum for all weights of a version, by which two runs are compared."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.weights.checksums import Hasher
from trainer.weights.versions import Weights


class WeightsChecksum:
    """The checksum of the weights that have passed through `over`: their names, dtypes, shapes and
    values, in order.
    """

    def __init__(self) -> None:
        self._digest = Hasher()

    def over(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights unchanged and adds them to the checksum."""
        for name, tensor in weights:
            self._digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            on_host = tensor.detach().contiguous().cpu()
            if on_host.numel():
                self._digest.update(memoryview(on_host.reshape(-1).view(torch.uint8).numpy()))
            yield name, tensor

    def hexdigest(self) -> str:
        """Returns 32 hex digits."""
        return self._digest.hexdigest()
