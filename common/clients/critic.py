"""The client of the critic-server."""

from collections.abc import Sequence

from common.clients.base import Client
from common.wire import codec
from common.wire.schemas import (
    CriticMetrics,
    CriticStatus,
    Float32,
    RestoreRequest,
    SaveRequest,
    TokenSequence,
    UpdateRequest,
    ValueRequest,
    Values,
    ValueTargets,
)


class CriticClient(Client):
    """Client of the critic-server.

    Every call may be repeated; a call for a critic that the server does not have gets a 409.
    """

    async def values(
        self, sequences: Sequence[TokenSequence], run_id: str | None = None, step: int | None = None
    ) -> list[Float32]:
        """Returns, for each sequence, the values [L] of the states before each completion token.

        With `run_id` and `step`, only the critic of that run at that step answers.
        """
        body = codec.encode(ValueRequest(list(sequences), run_id, step))
        response = await self.request(
            "POST", "/values", content=body, headers={"content-type": codec.MSGPACK}
        )
        return codec.decode(response.content, Values).values

    async def update(
        self, run_id: str, step: int, seed: int, rows: Sequence[ValueTargets]
    ) -> CriticMetrics:
        """Trains the critic of `run_id` at `step` on a batch, exactly once; it is then at `step` +
        1.
        """
        body = codec.encode(UpdateRequest(run_id, step, seed, list(rows)))
        headers = {"content-type": codec.MSGPACK}
        return await self.json("POST", "/update", CriticMetrics, content=body, headers=headers)

    async def restore(self, run_id: str, step: int, saved_by: str | None = None) -> CriticStatus:
        """Loads the critic for `run_id`: a new one (`step` 0), or the one that `saved_by` saved at
        `step`.
        """
        request = RestoreRequest(run_id=run_id, step=step, saved_by=saved_by)
        return await self.json("POST", "/restore", CriticStatus, json=request.model_dump())

    async def save(self, run_id: str, step: int, keep: int) -> CriticStatus:
        """Saves the critic of `run_id` at `step` in the server's state directory, which keeps the
        newest `keep`.
        """
        request = SaveRequest(run_id=run_id, step=step, keep=keep)
        return await self.json("POST", "/save", CriticStatus, json=request.model_dump())

    async def status(self) -> CriticStatus:
        return await self.json("GET", "/status", CriticStatus)
