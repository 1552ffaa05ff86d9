"""The data-server's client."""

from collections.abc import Sequence

from common import Json
from common.clients.base import Client
from common.wire.schemas import PassRateReport, Prompt, PromptBatch


class DataClient(Client):
    """data-server."""

    async def prompts(self, count: int, request_id: str) -> PromptBatch:
        """Returns the next `count` prompts of the shuffled stream; a retry with the same id gets
        the same prompts.
        """
        parameters = {"batch_size": count, "shuffle": True, "request_id": request_id}
        return await self.json("GET", "/prompts", PromptBatch, params=parameters)

    async def eval_prompts(self, limit: int, offset: int = 0) -> list[Prompt]:
        """Returns up to `limit` prompts of the held-out split from `offset` on, in a fixed
        order.
        """
        return await self._listed("/eval_prompts", limit, offset)

    async def train_prompts(self, limit: int, offset: int) -> list[Prompt]:
        """Returns up to `limit` prompts of the training split from `offset` on, in the order of
        the data set.
        """
        return await self._listed("/train_prompts", limit, offset)

    async def _listed(self, path: str, limit: int, offset: int) -> list[Prompt]:
        response = await self.request("GET", path, params={"limit": limit, "offset": offset})
        return [Prompt.model_validate(item) for item in response.json()["prompts"]]

    async def stats(self) -> Json:
        return await self.json("GET", "/stats", Json)

    async def seek(self, position: int, request_id: str | None = None, replaces: str = "") -> None:
        """Moves the shuffled stream to `position`, counted in prompts from its beginning. A copy
        with the same id that arrives late moves nothing. The caller's run begins, unless another
        one than `replaces` is the current one: this raises ServiceError (`superseded`).
        """
        body = {"position": position, "request_id": request_id, "replaces": replaces}
        await self.request("POST", "/seek", json=body)

    async def report_pass_rates(
        self, prompt_ids: Sequence[str], pass_rates: Sequence[float], request_id: str
    ) -> None:
        """Reports the share of correct completions of each prompt; a retry with the same id counts
        once.

        Raises ServiceError when the data-server has no curriculum or does not know these prompts.
        """
        report = PassRateReport(
            prompt_ids=list(prompt_ids), pass_rates=list(pass_rates), request_id=request_id
        )
        await self.request("POST", "/pass_rates", json=report.model_dump())
