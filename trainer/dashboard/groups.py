"""`/dashboard/api/groups…` and `/dashboard/api/prompts…`: the groups of runs, to be searched and looked at."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import orjson
from fastapi import FastAPI, Response
from fastapi import Query as Parameter
from pydantic import Field

from common.errors import NotFound, ServiceError
from services.http.openapi import JSON, described
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex, Mark, Query, Sort
from trainer.dashboard.group_shapes import FOUND, GROUP, OF_PROMPT
from trainer.dashboard.pieces import Pieces
from trainer.dashboard.replay import Replay, StoredReplay

_Whole = Annotated[int, Field(ge=0, lt=2**53)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class RunDirectory(Protocol):
    """A run, as far as its groups are concerned."""

    @property
    def directory(self) -> Path: ...

    @property
    def replay_store(self) -> Path | None:
        """The replay-buffer's file, if it is there."""


class RunGroups:
    """The groups of one run; `live` is its replay-buffer while it goes on."""

    def __init__(self, run: RunDirectory, live: Replay | None) -> None:
        self.directory = run.directory
        self._replay: Replay = live or StoredReplay(lambda: run.replay_store)
        self.index = GroupIndex(run.directory, self._replay)
        self._lock = threading.Lock()
        self._pieces: Pieces | ServiceError | None = None

    def detail(self, group_id: str, step: int | None) -> dict[str, Any]:
        """Raises NotFound."""
        row = self.index.find(group_id, step)
        if row is None:
            raise NotFound(
                "this run has no such group" + ("" if step is None else f" in step {step}"),
                field="id",
                value=group_id,
                remedy="/dashboard/api/groups lists those there are",
            )
        return group_detail(self.directory, row, self._replay, self._read_pieces())

    def _read_pieces(self) -> Pieces | ServiceError:
        """Those of the tokenizer, which is read once, or why there are none."""
        with self._lock:
            if not isinstance(self._pieces, Pieces):
                try:
                    self._pieces = Pieces.of(self.directory)
                except ServiceError as error:
                    self._pieces = error
            return self._pieces


def add_groups(app: FastAPI, runs: Sequence[RunDirectory], live: Replay | None = None) -> None:
    """Adds the calls to an app.

    Args:
        app: of the dashboard or of the trainer.
        runs: a call names one by its place here.
        live: the replay-buffer of the first run, which goes on; None: runs are looked at from outside, or afterwards.
    """
    opened: dict[Path, RunGroups] = {}
    lock = threading.Lock()

    def groups_of(run: int) -> RunGroups:
        if run >= len(runs):
            raise NotFound("there is no such run", field="run", value=run, remedy="/dashboard/api/runs lists those there are")
        directory = runs[run].directory
        with lock:
            if directory not in opened:
                opened[directory] = RunGroups(runs[run], live if run == 0 else None)
            return opened[directory]

    @app.get("/dashboard/api/groups", **described(answer=FOUND, fails=(404,)))
    def search(
        run: _Whole = 0,
        offset: _Whole = 0,
        limit: Annotated[int, Parameter(ge=1, le=1000)] = 50,
        step_from: _Whole | None = None,
        step_to: _Whole | None = None,
        reward_min: _Number | None = None,
        reward_max: _Number | None = None,
        length_min: _Whole | None = None,
        length_max: _Whole | None = None,
        prompt: Annotated[str, Parameter(max_length=1000)] = "",
        error: Mark | None = None,
        sort: Sort = "-step",
    ) -> Response:
        """Groups that were trained on, dropped or wait, page by page; what is missing of the run is in `problems`."""
        wanted = Query(step_from, step_to, reward_min, reward_max, length_min, length_max, prompt, error, sort)
        index = groups_of(run).index
        total, rows = index.search(wanted, limit, offset)
        return _answer({"total": total, "groups": rows, "problems": index.problems()})

    @app.get("/dashboard/api/groups/{group_id:path}", **described(answer=GROUP, fails=(404,)))
    def detail(group_id: str, run: _Whole = 0, step: _Whole | None = None) -> Response:
        """One group in full, as its newest step or `step` trained on it; a 404 says why it is not there any more."""
        return _answer(groups_of(run).detail(group_id, step))

    @app.get("/dashboard/api/prompts/{prompt_id:path}", **described(answer=OF_PROMPT, fails=(404,)))
    def prompt(prompt_id: str, run: _Whole = 0, limit: Annotated[int, Parameter(ge=1, le=1000)] = 200) -> Response:
        """The newest groups of one prompt, by step."""
        rows = groups_of(run).index.of_prompt(prompt_id, limit)
        if not rows:
            raise NotFound(
                "this run has no group of such a prompt",
                field="prompt_id",
                value=prompt_id,
                remedy="/dashboard/api/groups lists groups with the ids of their prompts",
            )
        return _answer({"prompt_id": prompt_id, "prompt": rows[0]["prompt"], "groups": rows})


def _answer(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)  # a number that is not finite becomes null
