"""The node's part in a broadcast of weights: its engine joins the group, receives, verifies and
resumes. The sender is `trainer.weights.transfer`, which `trainer.weights.broadcast` starts.
"""

import asyncio
import logging
import math

from common.errors import ServiceError
from common.process.futures import cancel
from common.wire.schemas import Broadcast, WeightChecksums, WeightManifest
from services.rollout.engine_client import EngineClient
from services.rollout.weights.trainer_client import TrainerClient

log = logging.getLogger(__name__)
_POLL_S = 2.0
_CLEAN_UP_S = 5.0
# The caller of `receive` ends it when `received` does not grow.
_UNBOUNDED = math.inf


class BroadcastWithdrawn(ServiceError):
    """The trainer has withdrawn the broadcast."""

    status = 409
    code = "withdrawn"


class BroadcastReceiver:
    """Receives weights by broadcast. After an error the engine may hold part of a version and stays
    paused.
    """

    def __init__(self, name: str, api: EngineClient, trainer: TrainerClient) -> None:
        self._name = name
        self._api = api
        self._trainer = trainer
        self._group: str | None = None
        self.received = 0
        """Steps of the current broadcast that are done: a number that grows."""

    def reset(self) -> None:
        """Forgets the group, since the engine was restarted."""
        self._group = None

    async def receive(self, manifest: WeightManifest, broadcast: Broadcast) -> None:
        """Receives a version, which is verified.

        Raises ServiceError when the engine refuses, the trainer withdraws, or the checksums differ.
        """
        self.received = 0
        work = asyncio.create_task(self._receive(manifest.version, broadcast))
        watch = asyncio.create_task(self._watch(manifest, broadcast))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise BroadcastWithdrawn(
                    "the trainer has withdrawn the broadcast", field="group", value=broadcast.group
                )
            work.result()
        finally:
            await cancel([work, watch])

    async def abandon(self, broadcast: Broadcast) -> bool:
        """Leaves the group after an error; returns False when the engine hangs and must be
        restarted.
        """
        self._group = None
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._clean_up(
                    "/destroy_weights_update_group", {"group_name": broadcast.group}
                )
                await self._clean_up("/end_weight_update", {})
        except TimeoutError:
            return False
        return True

    async def _clean_up(self, path: str, body: dict[str, str]) -> None:
        try:
            await self._api.control(path, body, _CLEAN_UP_S)
        except ServiceError as error:  # there is no group or session, or it failed
            log.info("%s: %s", path, error)

    async def _receive(self, version: int, broadcast: Broadcast) -> None:
        await self._join(broadcast)
        self.received += 1
        # No answer may mix two versions without saying so: requests wait until the last tensor.
        await self._api.pause()
        await self._api.control("/begin_weight_update", {}, _UNBOUNDED)

        last = len(broadcast.buckets) - 1
        for index, bucket in enumerate(broadcast.buckets):
            body = {
                **bucket.model_dump(),
                "group_name": broadcast.group,
                "load_format": "flattened_bucket",
                "flush_cache": index == last,
            }
            if index == last:
                body["weight_version"] = str(version)
            await self._api.control("/update_weights_from_distributed", body, _UNBOUNDED)
            self.received += 1
        await self._api.control("/end_weight_update", {}, _UNBOUNDED)
        self.received += 1

        # SGLang skips tensors whose names it does not know, and says nothing.
        sums = WeightChecksums(worker=self._name, ranks=await self._api.checksums(_UNBOUNDED))
        self.received += 1
        verdict = await self._trainer.verify(version, sums, _UNBOUNDED)
        log.info("weights %d arrived by broadcast; comparison: %s", version, verdict.compared)
        await self._api.resume()
        await self._api.confirm(str(version))

    async def _join(self, broadcast: Broadcast) -> None:
        if self._group == broadcast.group:
            return
        if self._group is not None:
            old = self._group
            self._group = None
            await self._clean_up("/destroy_weights_update_group", {"group_name": old})
        body = {
            "master_address": broadcast.master_address,
            "master_port": broadcast.master_port,
            "rank_offset": broadcast.ranks[self._name],
            "world_size": broadcast.world_size,
            "group_name": broadcast.group,
            "backend": broadcast.backend,
        }
        await self._api.control("/init_weights_update_group", body, _UNBOUNDED)
        self._group = broadcast.group

    async def _watch(self, manifest: WeightManifest, broadcast: Broadcast) -> None:
        """Returns when the trainer has withdrawn the broadcast; a trainer that does not answer may
        be busy.
        """
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                latest = await self._trainer.latest(None, wait_s=0, deadline_s=_POLL_S)
            except ServiceError:
                continue
            if latest is None or latest.version != manifest.version or latest.broadcast is None:
                return
            if latest.broadcast.group != broadcast.group:
                return
