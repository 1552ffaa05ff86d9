"""This node's part in a broadcast of weights: the calls that make its engine join, receive, check and go on."""

import asyncio
import logging

from common.errors import ServiceError
from common.schemas import Broadcast, WeightChecksums, WeightManifest
from services.rollout.engine_client import EngineClient
from services.rollout.weights.store import TrainerClient

log = logging.getLogger(__name__)
_POLL_S = 2.0
_CLEAN_UP_S = 5.0


class Withdrawn(ServiceError):
    """The trainer has given this broadcast up."""

    status = 409
    code = "withdrawn"


class Receiver:
    """Receives one version after the other. After an error the engine may hold a part of a version and stays paused.

    Args:
        name: of this node, as in its reports.
        api: of the engine.
        trainer: who sends.
        timeout_s: for one version, from the rendezvous to the verdict.
    """

    def __init__(self, name: str, api: EngineClient, trainer: TrainerClient, timeout_s: float) -> None:
        self._name, self._api, self._trainer, self._timeout_s = name, api, trainer, timeout_s
        self._group: str | None = None

    def forget(self) -> None:
        """The engine is a new one: it is in no group."""
        self._group = None

    async def receive(self, manifest: WeightManifest, broadcast: Broadcast) -> str:
        """Returns the checksum of the engine's weights when it serves this version, verified.

        Raises ServiceError or TimeoutError when the engine refused, the trainer gave up, or what came is not what was sent.
        """
        work = asyncio.create_task(self._receive(manifest.version, broadcast))
        watch = asyncio.create_task(self._watch(manifest, broadcast))
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Withdrawn("the trainer has given up the broadcast", field="group", value=broadcast.group)
            return work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def abandon(self, broadcast: Broadcast) -> bool:
        """Leaves the group after an error; False when the engine does not react and has to be started again."""
        self._group = None
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                for path, body in (
                    ("/destroy_weights_update_group", {"group_name": broadcast.group}),
                    ("/end_weight_update", {}),
                ):
                    try:
                        await self._api.control(path, body, _CLEAN_UP_S)
                    except ServiceError as error:  # there was none, or nothing in it was good
                        log.info("%s after a failed broadcast: %s", path, error)
        except TimeoutError:
            return False
        return True

    async def _receive(self, version: int, broadcast: Broadcast) -> str:
        limit = self._timeout_s
        await self._join(broadcast)
        await self._api.pause()
        await self._api.control("/begin_weight_update", {}, limit)
        last = len(broadcast.buckets) - 1
        for index, bucket in enumerate(broadcast.buckets):
            body = bucket.model_dump() | {"group_name": broadcast.group, "load_format": "flattened_bucket"}
            body |= {"flush_cache": True, "weight_version": str(version)} if index == last else {"flush_cache": False}
            await self._api.control("/update_weights_from_distributed", body, limit)
        await self._api.control("/end_weight_update", {}, limit)
        sums = WeightChecksums(worker=self._name, ranks=await self._api.checksums(limit))
        verdict = await self._trainer.verify(version, sums, limit)
        log.info("weights %d came by broadcast; compared: %s", version, verdict.compared)
        await self._api.resume()
        await self._api.confirm(str(version))
        return verdict.checksum

    async def _join(self, broadcast: Broadcast) -> None:
        if self._group == broadcast.group:
            return
        if self._group is not None:
            old, self._group = self._group, None
            try:
                await self._api.control("/destroy_weights_update_group", {"group_name": old}, _CLEAN_UP_S)
            except ServiceError as error:
                log.warning("the engine did not leave the group %s: %s", old, error)
        body = {
            "master_address": broadcast.master_address,
            "master_port": broadcast.master_port,
            "rank_offset": broadcast.ranks[self._name],
            "world_size": broadcast.world_size,
            "group_name": broadcast.group,
            "backend": broadcast.backend,
        }
        await self._api.control("/init_weights_update_group", body, self._timeout_s)
        self._group = broadcast.group

    async def _watch(self, manifest: WeightManifest, broadcast: Broadcast) -> None:
        """Returns when the trainer no longer offers this broadcast; one that does not answer may be busy."""
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
