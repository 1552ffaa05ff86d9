"""HTTP calls of the rollout viewer: `/dashboard/api/groups…` and `/dashboard/api/prompts…`."""

import math
import threading
from functools import cache
from typing import Annotated

import orjson
from fastapi import FastAPI, Response
from fastapi import Query as Parameter
from pydantic import Field

from common import Json
from common.errors import NotFound, ServiceError
from services.http.openapi import JSON, OBJECT, described
from trainer.dashboard.group_detail import group_detail
from trainer.dashboard.group_index import GroupIndex, Query, Whole
from trainer.dashboard.run_list import Runs, run_at
from trainer.dashboard.runs import RunReader
from trainer.dashboard.tokens import TokenTexts

# Time that one call spends reading new groups; the next call continues.
_AT_ONCE_S = 0.3
_token_texts = cache(TokenTexts.of_run)


class SearchParameters(Query):
    """Query string of `GET /dashboard/api/groups`."""

    run: Whole = 0
    offset: Whole = 0
    limit: int = Field(50, ge=1, le=1000)
    around: str | None = Field(None, max_length=1000)
    """Id of a group: the page that contains it is returned, whatever the offset."""
    around_step: Whole | None = None
    """The step of that group; without one its newest."""


def add_groups(app: FastAPI, runs: Runs) -> None:
    """Adds the calls to an app."""
    known: dict[RunReader, GroupIndex] = {}
    lock = threading.Lock()

    def index_of(run: RunReader) -> GroupIndex:
        with lock:
            if run not in known:
                known[run] = GroupIndex(run.directory)
            return known[run]

    answers = described(answer=OBJECT, fails=(404,))

    @app.get("/dashboard/api/groups", **answers)
    def search(query: Annotated[SearchParameters, Parameter()]) -> Response:
        """Lists groups that were trained on or dropped, page by page, each with an excerpt of its
        first completion; `problems` names what the run lacks.

        While `groups.jsonl` is read, `reading` has the bytes. Ask again until it is null.
        """
        index = index_of(run_at(runs, query.run))
        around = None if query.around is None else (query.around, query.around_step)
        total, offset, rows = index.search(
            query,
            limit=query.limit,
            offset=query.offset,
            around=around,
            # The page of a certain group is only known once all lines are read.
            patience_s=_AT_ONCE_S if around is None else math.inf,
        )
        return json_answer(
            {
                "total": total,
                "offset": offset,
                "groups": rows,
                "problems": index.problems(),
                "reading": index.left(),
            }
        )

    @app.get("/dashboard/api/groups/{group_id:path}", **answers)
    def detail(group_id: str, run: Whole = 0, step: Whole | None = None) -> Response:
        """Returns one group in full, as of its newest step or `step`; a 404 says why its content is
        gone.
        """
        of = run_at(runs, run)
        row = index_of(of).find(group_id, step)
        if row is None:
            raise NotFound(
                "this run has no such group, or not in this step",
                field="id",
                value=group_id,
                remedy="list the groups with /dashboard/api/groups",
            )
        try:
            texts: TokenTexts | ServiceError = _token_texts(of.directory)
        except ServiceError as error:
            texts = error
        return json_answer(group_detail(of.directory, row, texts))

    @app.get("/dashboard/api/prompts/{prompt_id:path}", **answers)
    def prompt(
        prompt_id: str, run: Whole = 0, limit: Annotated[int, Field(ge=1, le=1000)] = 200
    ) -> Response:
        """Lists the newest groups of one prompt, by step."""
        rows = index_of(run_at(runs, run)).of_prompt(prompt_id, limit)
        if not rows:
            raise NotFound(
                "this run has no group of such a prompt",
                field="prompt_id",
                value=prompt_id,
                remedy="/dashboard/api/groups lists groups with the ids of their prompts",
            )
        return json_answer({"prompt_id": prompt_id, "prompt": rows[0]["prompt"], "groups": rows})


def json_answer(content: Json) -> Response:
    """Returns an answer; a number that is not finite becomes null."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type=JSON, headers={"cache-control": "no-store"})
