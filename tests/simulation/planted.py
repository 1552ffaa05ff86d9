"""Bugs planted in the protocols, each of which the simulation must find.

`python -m tests.simulation.planted [NAME [SEEDS]]` runs seeds with one of them, or with each, and
prints the seed that finds it. A bug is a piece of a module's source and what stands there instead, so that it is
what a slip of a developer would be; the table fails when the source no longer has the piece.
"""

import importlib.abc
import importlib.util
import multiprocessing
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Bug(NamedTuple):
    """A piece of a file, and what stands there instead."""

    file: str
    right: str
    wrong: str
    scene: str = "groups"


_NOT_FOUND = "not found"

BUGS = {
    # ---------------------------------------------------------------- the stream of prompts
    "the cursor does not move": Bug(
        "services/data/stream.py",
        "self._set_cursor(db, stream, position + count, served + count)",
        "self._set_cursor(db, stream, position, served + count)",
    ),
    "every epoch has the order of the first": Bug(
        "services/data/stream.py",
        "int(self._order(epoch)[place])",
        "int(self._order(0)[place])",
    ),
    "a batch begins a prompt too late": Bug(
        "services/data/stream.py",
        "[self._place_at(i) for i in range(position, position + count)]",
        "[self._place_at(i + 1) for i in range(position, position + count)]",
    ),
    "seek keeps the position": Bug(
        "services/data/stream.py",
        "self._set_cursor(db, _SHUFFLED, position, served)",
        "self._set_cursor(db, _SHUFFLED, max(position, self._cursor(db, _SHUFFLED)[0]), served)",
    ),
    # ---------------------------------------------------------------- the replay buffer
    "a leased group is fresh at once": Bug(
        "services/replay/store.py", "lease_until <= ?", "lease_until >= ?"
    ),
    "a repeated take leases other groups": Bug(
        "services/replay/store.py",
        'self.records(f"WHERE request_id = ? {_ORDER}", request.request_id)',
        "list[tuple[int, GroupRecord]]()",
    ),
    "an answered take leases again": Bug(
        "services/replay/store.py",
        '.get("answered"):\n                    return',
        '.get("never"):\n                    return',
    ),
    "an answered take forgets what it evicted": Bug(
        "services/replay/store.py",
        'return Lease([], [], answer.get("evicted", 0))',
        "return Lease([], [], 0)",
    ),
    "a take that ended empty is not over": Bug(
        "services/replay/store.py",
        "                taken = []\n",
        '                return Lease([], [], answer.get("evicted", 0))\n',
    ),
    "a take looks for its lease when no group is fresh": Bug(
        "services/replay/store.py",
        "            if leased:\n",
        "            if leased and not fresh:\n",
    ),
    "groups that have come are not counted for those that wait": Bug(
        "services/replay/database.py", "if self.mark != self._kept:", "if self._kept is None:"
    ),
    "a count that grows by one is not stored": Bug(
        "services/replay/database.py", "        if more:\n", "        if more > 1:\n"
    ),
    "an added group is stored again": Bug(
        "services/replay/store.py",
        "if record.id in new or self._known(record.id):",
        "if record.id in new:",
    ),
    "an evicted group comes back": Bug(
        "services/replay/store.py",
        " UNION ALL SELECT 1 FROM gone WHERE id = :id",
        "",
    ),
    "an acknowledged group stays leased": Bug(
        "services/replay/store.py",
        'state="consumed", request_id=None, lease_until=None, priority=priority',
        "priority=priority",
    ),
    "a new run finds the groups of the one before": Bug(
        "services/replay/store.py",
        "WHERE state != 'consumed' OR position >= ?",
        "WHERE state = 'leased' OR position >= ?",
    ),
    "a run does not end the one before": Bug(
        "services/replay/buffer.py", "self.runs.begin(run_id)", "pass"
    ),
    "a group that is young enough is evicted": Bug(
        "services/replay/store.py",
        "state = 'fresh' AND version < ?",
        "state = 'fresh' AND version <= ?",
    ),
    "an eviction is reported twice": Bug(
        "services/replay/store.py",
        'evicted = len(old) + answer.get("evicted", 0)',
        'evicted = len(old) + answer.get("evicted", 0) + 1',
    ),
    "groups are taken that are not enough": Bug(
        "services/replay/store.py", "if len(taken) < request.count:", "if not taken:"
    ),
    "a lease ends while its run lasts": Bug(
        "services/replay/buffer.py", "_AS_LONG_AS_THE_RUN_S = 1e12", "_AS_LONG_AS_THE_RUN_S = 1.0"
    ),
    "dropped groups are not counted": Bug(
        "services/replay/store.py", 'self.count("dropped", len(keys))', "pass"
    ),
    # ---------------------------------------------------------------- the store on disk
    "an answer comes before the commit": Bug(
        "services/http/sqlite_store.py",
        'self.db.execute("COMMIT")',
        'self.db.execute("COMMIT" if mark.changes % 3 == 0 else "SELECT 1")',
    ),
    "a transaction that fails is kept": Bug(
        "services/http/sqlite_store.py", 'self.db.execute("ROLLBACK")', 'self.db.execute("COMMIT")'
    ),
    "commits are not synced": Bug(
        "services/http/sqlite_store.py", "synchronous = FULL", "synchronous = OFF"
    ),
    "a store that was set back is not noticed": Bug(
        "common/wire/headers.py", "self.changes < seen.changes", "False"
    ),
    "an answer tells of the store as it was before": Bug(
        "services/http/store_rollback.py",
        "[STORE_HEADER] = str(store.mark)",
        "[STORE_HEADER] = str(mark)",
    ),
    "answers are forgotten at once": Bug(
        "services/http/sqlite_store.py", "REMEMBERED_REQUESTS = 10_000", "REMEMBERED_REQUESTS = 0"
    ),
    # ---------------------------------------------------------------- the clients
    "a lost answer is not asked for again": Bug(
        "common/clients/base.py",
        "_NETWORK_ERRORS = (httpx.TransportError, TimeoutError, OSError)",
        "_NETWORK_ERRORS = (TimeoutError,)",
    ),
    "a busy service is not asked again": Bug(
        "common/clients/base.py", "return response.status_code in _RETRIED_STATUSES", "return False"
    ),
    "an attempt has no end": Bug(
        "common/clients/base.py",
        "asyncio.timeout(left if left < math.inf else None)",
        "asyncio.timeout(None)",
    ),
    "results go to other callers": Bug(
        "trainer/rollouts/request_batcher.py",
        "zip(waiting, results, strict=True)",
        "zip(waiting, reversed(results), strict=True)",
    ),
    "answers get the rewards of others": Bug(
        "common/clients/reward.py",
        "rewards = iter(answer.rewards)",
        "rewards = iter(answer.rewards[1:] + answer.rewards[:1])",
    ),
    "an answer across an update has one version": Bug(
        "common/clients/rollout.py", '    "weight_versions",\n', ""
    ),
    # ---------------------------------------------------------------- the reward-server
    "a part without a score counts as zero": Bug(
        "services/reward/functions/composite.py",
        "            total = None\n",
        "            total = total or 0.0\n",
    ),
    "a grader that fails gives a zero": Bug(
        "services/reward/hosts.py",
        "Score(None, error.status, reason=str(error))",
        "Score(0.0, reason=str(error))",
    ),
    "a grader that is late gets another call": Bug(
        "services/reward/pool.py", "        is_spent = True\n", "        is_spent = False\n"
    ),
    "a call goes to the first function": Bug(
        "services/reward/hosts.py", '"function": self._index', '"function": 0'
    ),
    "a batch is answered backwards": Bug(
        "services/reward/hosts.py",
        "list(chain.from_iterable(found))",
        "list(chain.from_iterable(reversed(found)))",
    ),
    "results are of other answers": Bug(
        "services/reward/service.py",
        "zip(indices, scores, strict=True)",
        "zip(reversed(indices), scores, strict=True)",
    ),
    # ---------------------------------------------------------------- the collector
    "an answer that cannot be graded earns nothing": Bug(
        "trainer/rollouts/group_maker.py",
        "math.nan if result.reward is None else result.reward\n",
        "result.reward or 0.0\n",
    ),
    "a failed grading is a reward": Bug(
        "trainer/rollouts/group_maker.py",
        'raise GroupFailed("reward", f"an answer could not be graded: {reason}")',
        "completions[0].reward = 0.0",
    ),
    "a dropped group's prompt is forgotten": Bug(
        "trainer/rollouts/collector.py",
        "self._drop(error, group)\n                self._retry(drawn)",
        "self._drop(error, group)",
    ),
    "a dropped group keeps its slot": Bug(
        "trainer/rollouts/collector.py",
        "self._retry(drawn)\n                self._collect_more(1)",
        "self._retry(drawn)",
    ),
    "a prompt is skipped after its first failure": Bug(
        "trainer/rollouts/prompt_cursor.py", "MAX_TRIES = 3", "MAX_TRIES = 1"
    ),
    "what is finished is drawn again": Bug(
        "trainer/rollouts/prompt_cursor.py",
        "if position >= self._first_open and position not in self._finished",
        "if position >= self._first_open",
    ),
    "progress forgets what overtook": Bug(
        "trainer/rollouts/prompt_cursor.py",
        "PromptProgress(self._first_open, sorted(self._finished))",
        "PromptProgress(self._first_open)",
    ),
    "progress is ahead": Bug(
        "trainer/rollouts/prompt_cursor.py",
        "PromptProgress(self._first_open, sorted(self._finished))",
        "PromptProgress(self.next)",
    ),
    "a draw passes over a prompt": Bug(
        "trainer/rollouts/prompt_cursor.py",
        "self.next += len(prompts)",
        "self.next += len(prompts) + 1",
    ),
    "finishing is forgotten": Bug(
        "trainer/rollouts/prompt_cursor.py", "self._finished.add(position)", "pass"
    ),
    "draws of one size have one id": Bug(
        "trainer/rollouts/collector.py",
        'f"{self._run_id}-{position}-{missing}"',
        'f"{self._run_id}-{missing}"',
    ),
    "a lost store is not filled again": Bug(
        "trainer/rollouts/collector.py", "added += await self._services.replay.add(", "_ = ("
    ),
    "takes have one id": Bug(
        "trainer/rollouts/rollouts.py", "self._requests += 1", "self._requests = 1"
    ),
    "slots are free before the engines serve the weights": Bug(
        "trainer/rollouts/rollouts.py",
        "when.add_done_callback(partial(self._free_slots, len(batch.fresh)))",
        "self._loop.loop.call_soon(self._collector.free_slots, len(batch.fresh))",
    ),
    "there is a slot too many": Bug(
        "trainer/rollouts/rollouts.py",
        "(self._config.trainer.max_staleness + 1) * self._fresh_per_step)",
        "(self._config.trainer.max_staleness + 2) * self._fresh_per_step)",
    ),
    "an update does not wait until its groups are handed out": Bug(
        "trainer/rollouts/rollouts.py", "self._confirm()\n", "pass\n"
    ),
    "groups of equal rewards are reused": Bug(
        "trainer/rollouts/collector.py",
        "await self._services.replay.set_priorities({group.id: 0.0 for group in groups})",
        "pass",
    ),
    "nothing is acknowledged": Bug(
        "trainer/rollouts/rollouts.py",
        "await self._collector.acknowledge(fresh)",
        "await self._collector.acknowledge(fresh[:0])",
    ),
}

_FLEET = {
    # ---------------------------------------------------------------- a node's state
    "an engine that failed an update keeps its traffic": Bug(
        "services/rollout/state.py",
        "        self.admitted = False\n        self.detail = reason\n        self.failures += 1",
        "        self.detail = reason\n        self.failures += 1",
    ),
    "an engine that comes up behind is admitted": Bug(
        "services/rollout/state.py", "if self.wanted in (None, serves):", "if True:"
    ),
    # ---------------------------------------------------------------- an agent
    "an agent that is cut off stays": Bug(
        "services/rollout/first_node.py",
        "not self._may_serve or silence_s > _CUT_OFF_S",
        "not self._may_serve",
    ),
    "an agent does not hear that the trainer went on": Bug(
        "services/rollout/first_node.py",
        "not self._may_serve or silence_s > _CUT_OFF_S",
        "silence_s > _CUT_OFF_S",
    ),
    "an agent that has never heard the trainer lists its engine": Bug(
        "services/rollout/first_node.py", "self._follower.is_trainer_silent\n", "False\n"
    ),
    "an engine starts while the router lists it": Bug(
        "services/rollout/first_node.py", "        await self._remove_before_start()\n", ""
    ),
    "an engine starts from damaged weights": Bug(
        "services/rollout/first_node.py",
        "if self._store.hold(path) and await self._store.verify(manifest, path):",
        "if self._store.hold(path):",
    ),
    "an engine that a late call makes older stays": Bug(
        "services/rollout/state.py",
        "        self.serves = None\n        self.admitted = False\n        self.detail = reason\n\n"
        "    def update_failed",
        "        self.detail = reason\n\n    def update_failed",
    ),
    "an engine that has gone over to older weights is not loaded again": Bug(
        "services/rollout/weights/follow.py",
        "WeightId.of(manifest) == self._state.serves\n",
        "WeightId.of(manifest) == self._state.wanted\n",
    ),
    # ---------------------------------------------------------------- engine and router
    "a load leaves the engine paused": Bug(
        "services/rollout/engine_client.py",
        "        await self.resume()\n        await self.confirm(version)",
        "        await self.confirm(version)",
    ),
    "a load is believed": Bug(
        "services/rollout/engine_client.py",
        "        await self.resume()\n        await self.confirm(version)",
        "        await self.resume()",
    ),
    "an engine is never listed again": Bug(
        "services/rollout/router.py",
        "            return not own\n\n        if not own:",
        "            return not own\n\n        if False:",
    ),
    "an engine is never removed": Bug(
        "services/rollout/router.py", "for worker_id in own:", "for worker_id in ():"
    ),
    "a router that hangs is not noticed": Bug(
        "services/rollout/supervision.py", "elif self.up and unhealthy_s >", "elif False and 0 >"
    ),
    # ---------------------------------------------------------------- the trainer
    "the trainer does not fence": Bug(
        "trainer/weights/publisher.py", "            self.fence(worker)", "            pass"
    ),
    "weights count as served once they are announced": Bug(
        "trainer/weights/publisher.py",
        "            self._wait_confirmed(manifest)\n            if self",
        "            if self",
    ),
    "a node that updates counts as one that serves": Bug(
        "trainer/weights/board.py",
        'return _has(worker, manifest) and worker.state == "ready"',
        'return worker.state in ("ready", "updating")',
    ),
    "a version of an earlier run counts": Bug(
        "trainer/weights/board.py",
        "worker.run_id == manifest.run_id and worker.version",
        "worker.version",
    ),
    "a node that fell silent is not fenced": Bug(
        "trainer/weights/board.py",
        "(worker.silence_s >= _SILENT_S or not _serves(worker.report, manifest))",
        "worker.silence_s < _SILENT_S",
    ),
    "the trainer goes on while a node that it excludes has a permission": Bug(
        "trainer/weights/board.py",
        "            while any(map(self._may_list, excluded)):\n",
        "            while False:\n",
    ),
    "a permission ends before its agent takes the engine out": Bug(
        "trainer/weights/board.py", "_PERMISSION_S = 30.0", "_PERMISSION_S = 1.0"
    ),
    "a node that came back is not waited for": Bug(
        "trainer/weights/board.py",
        "                self._excluded.discard(report.name)  # from now on it is waited for\n",
        "                pass\n",
    ),
    "a node that was given up is waited for again": Bug(
        "trainer/weights/board.py",
        "            missing = {name: each for name, each in others.items() if name not in "
        "self._excluded}\n",
        "            missing = dict(others)\n",
    ),
    "a node of any version may serve": Bug(
        "trainer/weights/board.py", "            self._confirmed = manifest\n", ""
    ),
    # ---------------------------------------------------------------- a node's weights
    "a version of an earlier run is in the way": Bug(
        "services/rollout/weights/store.py",
        "        self._forget(target)  # another run's version, or other content\n",
        "",
    ),
    "weights that are there already are not compared": Bug(
        "services/rollout/weights/store.py",
        "if _same(known, manifest) and await self.verify(manifest, path):",
        "if _same(known, manifest):",
    ),
    "a version of an earlier run is not replaced": Bug(
        "services/rollout/weights/follow.py",
        "WeightId.of(manifest) == self._state.serves\n",
        "manifest.version == getattr(self._state.serves, 'version', None)\n",
    ),
    # ---------------------------------------------------------------- time
    "an agent that is cut off leaves after the trainer has gone on": Bug(
        "services/rollout/first_node.py", "_CUT_OFF_S = 20.0", "_CUT_OFF_S = 60.0"
    ),
}

_EPISODES = {
    # ---------------------------------------------------------------- the environment-server
    "a session is kept after its episode": Bug(
        "services/environment/service.py",
        "self._sessions.pop(session.id, None)",
        "self._sessions.get(session.id)",
    ),
    "a request is counted as one episode at its end": Bug(
        "services/environment/service.py", "self._running -= request.n", "self._running -= 1"
    ),
    "episodes are played again for a retry": Bug(
        "services/environment/service.py",
        "if known is None or known.task.cancelled():",
        "if known is None or known.task.done():",
    ),
    "a request that was ended is counted for ever": Bug(
        "services/environment/service.py",
        "            def ended(_: object) -> None:\n                self._running -= request.n\n",
        "            def ended(_: object) -> None:\n"
        "                self._running -= 0 if task.cancelled() else request.n\n",
    ),
    "a request that is forgotten takes all with it": Bug(
        "services/environment/service.py", "if known.task is task:", "if True:"
    ),
    "an episode that was lost is a zero": Bug(
        "services/environment/outcome.py",
        'outcome.status = "died"\n            outcome.detail = str(error)',
        "outcome.reward = 0.0\n            outcome.detail = str(error)",
    ),
    "a program may grade a call without an answer": Bug(
        "services/environment/program_runner.py",
        "        _end(session)\n        has_failed",
        "        session.close()\n        has_failed",
    ),
    "an episode that failed keeps its reward": Bug(
        "services/environment/service.py",
        'reward=outcome.reward if outcome.status == "ok" else None',
        "reward=outcome.reward",
    ),
    # ---------------------------------------------------------------- its gateway
    "a call that was refused under load was answered": Bug(
        "services/environment/program_requests.py", "_NO_ANSWER = 499", "_NO_ANSWER = 504"
    ),
    "a call whose client left before it was read is unknown": Bug(
        "services/environment/program_requests.py",
        "if request.was_left or not session.closed:",
        "if not request.was_left and not session.closed:",
    ),
    "an answer to any call is one to all": Bug(
        "services/environment/program_requests.py",
        "if each.is_repeated_by(request) and each.lacks_answer():",
        "if each.lacks_answer():",
    ),
    "an answer counts as read once it is sent": Bug(
        "services/environment/program_requests.py",
        "request.delivery = connection.deliver()",
        "connection.deliver()",
    ),
    "an answer that nobody took counts as read": Bug(
        "services/environment/app.py", "answer.call.has_answer = followed.has_answer", "pass"
    ),
    "an equal call is the same call": Bug(
        "services/environment/session.py", "        if calls and is_retry:", "        if calls:"
    ),
    "a call continues the latest answer, whichever it was sent": Bug(
        "services/environment/tree.py",
        "            and self.nodes[-1].answer.is_sent(messages[answered])\n",
        "",
    ),
    "a call that failed keeps its turn": Bug(
        "services/environment/session.py",
        "self.turns -= 1  # the call may be repeated",
        "pass",
    ),
    # ---------------------------------------------------------------- its record
    "an episode has the version of its first answer": Bug(
        "services/environment/tree.py",
        "if not begins or begins[-1][0] != version:",
        "if not begins:",
    ),
    "what the template adds is trained on": Bug(
        "services/environment/tree.py", "mask += [0] * len", "mask += [1] * len"
    ),
    "an answer that two sequences share is trained on twice": Bug(
        "services/environment/tree.py", "    owned.update(path)\n", ""
    ),
    "a tool call that failed is made again": Bug(
        "services/environment/class_runner.py",
        "            result = await self._run(function, timeout_s)\n",
        "            await self._run(function, timeout_s)\n"
        "            result = await self._run(function, timeout_s)\n",
    ),
    # ---------------------------------------------------------------- the collector
    "an episode has the reward of another": Bug(
        "trainer/rollouts/group_maker.py",
        "enumerate(zip(episodes, answers, strict=True))",
        "enumerate(zip(episodes, reversed(answers), strict=True))",
    ),
    "a lost episode is a whole one": Bug(
        "trainer/rollouts/group_maker.py",
        'if episode.status == "ok":',
        "if episode.sequences or whole:",
    ),
}

_TAKEOVER = {
    "a run that has ended adds and takes groups": Bug(
        "services/replay/worker.py",
        "            self.buffer.runs.check_current(logs.run_id())\n",
        "",
    ),
    "a run that has ended draws prompts": Bug(
        "services/data/stream.py",
        "            self._runs.check(logs.run_id())\n            position = None",
        "            position = None",
    ),
    "a data-server that starts again knows of no runs": Bug(
        "services/data/stream.py",
        "                    self.begin_run(run_id)\n",
        "                    pass\n",
    ),
    "no run ends": Bug("common/process/current_run.py", "            self.current = run_id\n", ""),
    "a run that is not known to have begun is let in": Bug(
        "common/process/current_run.py",
        "if run_id and self.current and run_id != self.current:",
        "if run_id in self._ended:",
    ),
    # ---------------------------------------------------------------- the lock of their directory
    "a heartbeat counts as none": Bug(
        "common/process/run_lock.py",
        "                return bool(now)\n",
        "                return False\n",
    ),
    "a volume that does not answer counts as a free directory": Bug(
        "common/process/run_lock.py",
        "        content = os.pread(self._file, _SIZE, 0)\n        try:\n"
        "            return dict(json.loads(content))\n        except (TypeError, ValueError):\n",
        "        try:\n            return dict(json.loads(os.pread(self._file, _SIZE, 0)))\n"
        "        except (OSError, TypeError, ValueError):\n",
    ),
    "a run that was taken over begins again": Bug(
        "common/process/current_run.py", "if run_id in self._ended:", "if False:"
    ),
}
for scene, bugs in (("fleet", _FLEET), ("episodes", _EPISODES), ("takeover", _TAKEOVER)):
    BUGS |= {name: bug._replace(scene=scene) for name, bug in bugs.items()}


class _Planted(SourceFileLoader):
    """Loads a module with a bug in it."""

    bug: Bug

    def get_code(self, fullname: str) -> CodeType | None:
        source = Path(self.path).read_text()
        if source.count(self.bug.right) != 1:
            raise ValueError(f"{self.bug.file} does not have once: {self.bug.right}")
        return compile(source.replace(self.bug.right, self.bug.wrong), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug
        self._module = bug.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        path = str(ROOT / self._bug.file)
        loader = _Planted(fullname, path)
        loader.bug = self._bug
        return importlib.util.spec_from_file_location(fullname, path, loader=loader)


def find(bug: Bug, count: int) -> str:
    """Runs seeds with the bug; returns which one finds it, and how. Call it in a process that has
    imported no module of the product.
    """
    sys.meta_path.insert(0, _Finder(bug))
    from tests.simulation.run import in_memory, simulate

    for seed in range(count):
        with in_memory() as directory:
            try:
                simulate(seed, Path(directory), bug.scene)
            except BaseException as found:
                return f"seed {seed}: {type(found).__name__}: {found}"
    return f"{_NOT_FOUND} by {count} seeds"


def main() -> int:
    """Looks for the bugs; the exit status is the number of those that are not found."""
    names = [sys.argv[1]] if len(sys.argv) > 1 else list(BUGS)
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000
    import fastapi  # noqa: F401  # the children need not
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401

    missed = 0
    context = multiprocessing.get_context("fork")
    for name in names:
        # Each bug in a process of its own, which imports the product with it.
        with context.Pool(1) as pool:
            found = pool.apply(find, (BUGS[name], count))
        print(f"{name}: {found}", flush=True)
        missed += found.startswith(_NOT_FOUND)
    return missed


if __name__ == "__main__":
    sys.exit(main())
