"""A clock that tests move."""


class Clock:
    """Stands for the module `time` where only `monotonic` is used."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
