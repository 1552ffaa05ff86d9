"""Determines the device for a reward model in a separate process, because the server never imports
torch. It is a module of its own because `services.reward.functions` imports `reward_model`.
"""

from collections.abc import Callable

from common import Json
from common.errors import ConfigError


def prepare(_: Json) -> Callable[[], Callable[[str], str]]:
    """See `WorkerSpec`: the handler returns the name of the device; making it fails if there is no
    usable device.
    """
    from learning.device import choose_device

    try:
        device = choose_device(
            "auto", "device", on_cpu="remove the GPU from the resources of reward-server"
        )
    except ConfigError as error:
        raise RuntimeError(f"{error.message}; {error.remedy}") from None
    return lambda: lambda _: str(device)
