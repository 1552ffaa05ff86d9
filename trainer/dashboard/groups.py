"""HTTP calls of the rollout viewer: `/dashboard/api/groups…` and `/dashboard/api/prompts…`."""

import threading
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Response
from fastapi import Query as Parameter
from pydantic import Field

from common.errors import NotFound, ServiceError
from services.http.openapi import JSON, OBJECT, described
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex, Query, Whole
from trainer.dashboard.replay import Replay
from trainer.dashboard.runs import RunReader
from trainer.dashboard.tokens import TokenTexts


class RunGroups:
    """The groups of one run; `live` is its replay-buffer while it trains."""

    def __init__(self, run: RunReader, live: Replay | None) -> None:
        self.directory = run.directory
        self._replay = live
        self.index = GroupIndex(run.directory, self._replay)
        self._lock = threading.Lock()
        self._token_texts: TokenTexts | None = None

    def detail(self, group_id: str, step: int | None) -> dict[str, Any]:
        row = self.index.find(group_id, step)
        if row is None:
            remedy = "list the groups with /dashboard/api/groups"
            message = "this run has no such group" + ("" if step is None else f" in step {step}")
            raise NotFound(message, field="id", value=group_id, remedy=remedy)
        return group_detail(self.directory, row, self._replay, self._read_tokenizer())

    def _read_tokenizer(self) -> TokenTexts | ServiceError:
        with self._lock:
            try:
                self._token_texts = self._token_texts or TokenTexts.of_run(self.directory)
            except ServiceError as error:
                return error
            return self._token_texts


class SearchParameters(Query):
    """Query string of `GET /dashboard/api/groups`."""

    run: Whole = 0
    offset: Whole = 0
    limit: int = Field(50, ge=1, le=1000)


def add_groups(app: FastAPI, runs: Sequence[RunReader], live: Replay | None = None) -> None:
    """Adds the calls to an app; `live` is the replay-buffer of the first run while that trains."""
    groups = [RunGroups(run, None if i else live) for i, run in enumerate(runs)]

    def groups_of(run: int) -> RunGroups:
        if run >= len(groups):
            raise NotFound("there is no such run", field="run", value=run, remedy=f"0 to {len(groups) - 1}")
        return groups[run]

    answers = described(answer=OBJECT, fails=(404,))

    @app.get("/dashboard/api/groups", **answers)
    def search(query: Annotated[SearchParameters, Parameter()]) -> Response:
        """Lists groups that were trained on, dropped or wait, page by page; `problems` names what the run lacks."""
        index = groups_of(query.run).index
        total, rows = index.search(query, query.limit, query.offset)
        return _answer({"total": total, "groups": rows, "problems": index.problems()})

    @app.get("/dashboard/api/groups/{group_id:path}", **answers)
    def detail(group_id: str, run: Whole = 0, step: Whole | None = None) -> Response:
        """Shows one group in full, as its newest step or `step` trained on it; a 404 says why its content is gone."""
        return _answer(groups_of(run).detail(group_id, step))

    @app.get("/dashboard/api/prompts/{prompt_id:path}", **answers)
    def prompt(prompt_id: str, run: Whole = 0, limit: Annotated[int, Field(ge=1, le=1000)] = 200) -> Response:
        """Lists the newest groups of one prompt, by step."""
        rows = groups_of(run).index.of_prompt(prompt_id, limit)
        if not rows:
            remedy = "/dashboard/api/groups lists groups with the ids of their prompts"
            raise NotFound("this run has no group of such a prompt", field="prompt_id", value=prompt_id, remedy=remedy)
        return _answer({"prompt_id": prompt_id, "prompt": rows[0]["prompt"], "groups": rows})


def _answer(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)  # a number that is not finite becomes null
