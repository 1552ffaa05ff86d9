"""Asks the living processes of a run: rank 0 about all ranks, and every service about itself."""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from common.clients.base import Client
from common.clients.unreachable import problem_of
from common.errors import ConfigError, ServiceError
from common.process.security import TOKEN, authorization
from common.process.topology import ROLLOUT, TRAINER, Topology
from common.process.watchdog import RankWhere
from common.settings.config import Config, from_mapping
from trainer.diagnosis.facts import Facts, RankFacts, ServiceFacts
from trainer.diagnosis.health import BAD_ANSWER, NO_ANSWER, Health, get
from trainer.diagnosis.run_files import log_folders, read_facts, read_topology, token_file

_TRAINER_PATIENCE_S = 3.5
"""Rank 0 waits two seconds for the others."""
_AGAIN_S = 1.2
"""Pause before services are asked again: longer than `Health` reuses an answer."""
_COLLECTIVE = re.compile(r'File "[^"]*torch/distributed/[^"]*", line \d+, in (\w+)')
_WRAPPERS = frozenset({"wrapper", "_fn", "inner", "decorate_context"})
_MAIN = "thread MainThread:"


def collect(run_dir: Path, logs: Path | None = None) -> Facts:
    """Returns all that can be known of a run within some seconds.

    The token of the run is that of the environment, or the one that `jobgroup.local` wrote. What
    keeps this process from asking, such as a token that cannot be one or settings of another
    version, is in `not_asked`: the files are read all the same. Raises ConfigError when there is no
    such directory.
    """
    facts = read_facts(run_dir, logs)
    topology = read_topology(run_dir)
    if not facts.lives or topology is None:
        return facts
    try:
        file = token_file(log_folders(run_dir, facts.config, logs))
        headers = _authorization_of(file) if file and not os.environ.get(TOKEN) else None
        config = from_mapping(facts.config)
        asyncio.run(ask(facts, config, topology, headers=headers))
    except ServiceError as error:
        facts.asked = False
        facts.not_asked = error.body()["error"]
    return facts


def _authorization_of(file: Path) -> dict[str, str]:
    """Returns the header with the token in a file. Raises ConfigError if it cannot be one."""
    try:
        return authorization({TOKEN: file.read_text(encoding="ascii").strip()})
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            str(getattr(error, "message", error)),
            field=TOKEN,
            value=str(file),
            remedy="set API_TOKEN to that of the run, or remove this file",
        ) from None


async def ask(
    facts: Facts,
    config: Config,
    topology: Topology,
    *,
    own: bool = False,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Adds to `facts` what the living processes answer.

    With `own`, rank 0 is not asked: it is this process, and about to end. `headers` have the token
    of the run; None: that of this process.
    """
    facts.asked = True
    nodes = 1 if own else await _ask_trainer(facts, config, topology, headers)
    health = Health(config, topology, lambda: nodes, lambda: None, headers=headers)
    async with health.running():
        _, *services = await health.ask()
        if any(service.problem == "silent" for service in services):
            # A busy machine may take that long once.
            await asyncio.sleep(_AGAIN_S)
            _, *services = await health.ask()
        answers = await health.where()
    facts.now = time.time()
    facts.services = []
    for service in services:
        found = ServiceFacts(**service.model_dump())
        where = answers.get(service.name)
        if where is not None:
            found.awaited = where.awaited
            found.stacks = where.stacks
            found.release = where.version
        facts.services.append(found)


async def _ask_trainer(
    facts: Facts, config: Config, topology: Topology, headers: Mapping[str, str] | None
) -> int:
    """Notes where the ranks are, or why rank 0 does not answer; returns the number of rollout
    nodes.
    """
    nodes = max(1, sum(name.startswith(f"{ROLLOUT}-") for name in topology.local_hosts))
    url = topology.url(TRAINER, config.trainer.port)
    client = Client(TRAINER, url, headers=headers)
    try:
        async with asyncio.timeout(_TRAINER_PATIENCE_S), client:
            workers = await get(client, "/workers", _TRAINER_PATIENCE_S)
            ranks = await get(client, "/ranks", _TRAINER_PATIENCE_S)
            nodes = max([nodes, *(int(worker["num_nodes"]) for worker in workers)])
            for each in map(RankWhere.model_validate, ranks):
                call = collective(each.stacks)
                rank = RankFacts(**each.model_dump(), answered=each.pid > 0, collective=call)
                facts.ranks.append(rank)
    except TimeoutError:
        facts.trainer_problem = "silent"
    except NO_ANSWER as error:
        facts.trainer_problem = problem_of(error)
    except BAD_ANSWER:
        facts.trainer_problem = "error"
    return nodes


def collective(stacks: str) -> str:
    """Returns the collective call in the stack of the main thread; empty without one."""
    _, _, after = stacks.partition(_MAIN)
    main = after.partition("\nthread ")[0]
    calls = [name for name in _COLLECTIVE.findall(main) if name not in _WRAPPERS]
    if calls:
        return str(calls[0])
    return "backward" if "_engine_run_backward" in main else ""
