"""The replay-buffer's client."""

from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from common import Json
from common.clients.base import Client
from common.wire import codec
from common.wire.schemas import Group, SampledGroups, SampleRequest, TakenGroups, TakeRequest

_T = TypeVar("_T")


class ReplayClient(Client):
    """replay-buffer."""

    _headers = {"content-type": codec.MSGPACK, "accept": codec.MSGPACK}  # noqa: RUF012

    async def add(self, groups: list[Group]) -> int:
        """Stores groups and returns how many are new; durable when this returns. Adding an id again
        changes nothing.
        """
        answer = await self.request(
            "POST", "/groups", content=codec.encode_groups(groups), headers=self._headers
        )
        return int(answer.json()["added"])

    async def take(self, request: TakeRequest) -> TakenGroups:
        """Returns `count` fresh groups, or their ids, leased until `ack`; none when there are fewer
        after `wait_s` seconds.
        """
        return await self._groups("/groups/take", request, TakenGroups)

    async def ack(self, ids: list[str]) -> None:
        """Acknowledges groups that were trained on: they are never handed out as fresh again."""
        await self.request("POST", "/groups/ack", json={"ids": ids})

    async def sample(self, request: SampleRequest) -> SampledGroups:
        """Returns groups that were already trained on, drawn by priority, with importance
        weights.
        """
        return await self._groups("/groups/sample", request, SampledGroups)

    async def _groups(self, path: str, request: BaseModel, answer: type[_T]) -> _T:
        response = await self.request(
            "POST", path, json=request.model_dump(), headers={"accept": codec.MSGPACK}
        )
        return codec.decode(response.content, answer)

    async def set_priorities(
        self, priorities: dict[str, float], request_id: str | None = None
    ) -> None:
        """Sets the priorities of groups for `sample`; unknown ids are ignored, as they may have
        left the buffer. A copy with the same id that arrives late changes nothing.
        """
        body = {
            "ids": list(priorities),
            "priorities": list(priorities.values()),
            "request_id": request_id,
        }
        await self.request("POST", "/groups/priorities", json=body)

    async def reset_fresh(
        self,
        from_position: int | None = None,
        step: int | None = None,
        run_id: str | None = None,
    ) -> int:
        """Drops every unacknowledged group, because a trainer that resumes draws their prompts
        again.

        `from_position` also drops all groups from that position in the prompt stream on; `step`
        also undoes reuse draws made at that step or later. With `run_id` that run begins: calls of
        the runs before it are refused from now on. Returns how many groups were dropped.
        """
        params = {"from_position": from_position, "step": step, "run_id": run_id}
        given = {name: value for name, value in params.items() if value is not None}
        answer = await self.request("POST", "/groups/reset_fresh", params=given)
        return int(answer.json()["dropped"])

    async def listing(
        self, state: str, limit: int = 1000, deadline_s: float | None = None
    ) -> list[Json]:
        """Describes the first `limit` groups in this state, without their contents."""
        params = {"state": state, "limit": limit}
        answer = await self.request("GET", "/groups", params=params, deadline_s=deadline_s)
        return list(answer.json()["groups"])

    async def group(self, group_id: str, deadline_s: float | None = None) -> Group:
        """Returns one group. Raises ServiceError (404) when it does not exist."""
        path = f"/groups/{quote(group_id, safe='')}"
        answer = await self.request("GET", path, deadline_s=deadline_s)
        return codec.decode_json(answer.content, Group)

    async def stats(self) -> Json:
        return await self.json("GET", "/stats", Json)
