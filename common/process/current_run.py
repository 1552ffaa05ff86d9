"""The run that a service works for, so that late calls of the runs before it are refused."""

from collections.abc import Sequence

from common.errors import Conflict


class CurrentRun:
    """Knows which run has begun last; `begun` are the runs so far, in their order."""

    def __init__(self, begun: Sequence[str] = ()) -> None:
        self.current = ""
        """Empty before the first run."""
        self._ended = set[str]()
        for run_id in begun:
            self.begin(run_id)

    def begin(self, run_id: str) -> None:
        """Ends the current run, unless this is it or has no id."""
        if run_id and run_id != self.current:
            self._ended.add(self.current)
            self.current = run_id

    def check_begin(self, run_id: str, replaces: str) -> None:
        """Raises Conflict unless a run may begin. It may end `replaces` alone, which its trainer
        knew as the current one: a claim that arrives late ends no run that has begun meanwhile.
        """
        self.check(run_id)
        if self.current != replaces:
            self.check_current(run_id)

    def check(self, run_id: str) -> None:
        """Raises Conflict for a run after which another one has begun: its calls arrive late, or
        two runs train.
        """
        if run_id in self._ended:
            self.check_current(run_id)

    def check_current(self, run_id: str) -> None:
        """Raises Conflict for another run than the current one, also for one that is not known to
        have begun: a service that lost what it stored does not know the runs before.
        """
        if run_id and self.current and run_id != self.current:
            raise Conflict(
                f"run {run_id} is over for this service: run {self.current} began after it",
                code="superseded",
                field="run_id",
                value=run_id,
                remedy="end one of the two runs, or give it its own services",
            )
