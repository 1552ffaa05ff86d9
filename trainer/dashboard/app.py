"""HTTP of the dashboard: its page, and the numbers of runs under `/dashboard/api/`."""

import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Query, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import BaseModel

from common.errors import NotFound
from services.http.app import create_app
from services.http.openapi import OBJECT, described, errors
from trainer.dashboard.groups import add_groups
from trainer.dashboard.health import Health, ServiceHealth
from trainer.dashboard.replay import Replay
from trainer.dashboard.runs import Run

STATIC = Path(__file__).parent / "static"
_FILES = {file.name: file for file in sorted(STATIC.iterdir()) if file.is_file()}
PAGES = frozenset({"/", "/dashboard", "/dashboard/", *(f"/dashboard/static/{name}" for name in _FILES)})
"""What a browser gets without the token: the page holds no data of a run."""
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MAX_POINTS = 5000
_Step = Annotated[int, Query(ge=0, lt=2**53)]
mimetypes.add_type("text/javascript", ".js")  # some systems say text/plain, and browsers refuse such a module


class RunSummary(BaseModel):
    """A run directory."""

    run: int
    """Index that all other calls name it by."""
    name: str
    directory: str
    live: bool
    """Whether the process that answers is the one that trains."""
    problems: list[str]
    """What is missing or damaged in the directory."""
    step: int | None
    """The newest."""
    time: float | None
    """Of the newest step, in seconds since 1970."""


class ServicesHealth(BaseModel):
    """Answer of `GET /dashboard/api/health`."""

    asked: bool
    """False: this process reads the run directory and knows of no services; the running trainer does."""
    services: list[ServiceHealth]


def create_dashboard_app(runs: Sequence[Run]) -> FastAPI:
    """The app that shows run directories; where the run still trains elsewhere, it shows new steps as they are written."""
    app = create_app("dashboard", max_body_bytes=1 << 20, open_paths=PAGES)
    _add(app, runs, None, None)
    return app


def add_dashboard(app: FastAPI, run: Run, health: Health | None = None, replay: Replay | None = None) -> None:
    """Adds the page to the app of the process that trains this run; the app has `PAGES` as open paths.

    Args:
        app: of the trainer.
        run: that it trains.
        health: asks the other tasks.
        replay: its replay-buffer.
    """
    _add(app, [run], health, replay)


def _add(app: FastAPI, runs: Sequence[Run], health: Health | None, replay: Replay | None) -> None:
    _add_page(app)
    add_groups(app, runs, replay)

    async def chosen(run: Annotated[int, Query(ge=0, lt=2**31)] = 0) -> Run:
        if run >= len(runs):
            raise NotFound("there is no such run", field="run", value=run, remedy=f"0 to {len(runs) - 1}")
        return runs[run]

    @app.get("/dashboard/api/runs")
    def all_runs() -> list[RunSummary]:
        """The run directories that are shown."""
        return [RunSummary(run=i, **run.summary()) for i, run in enumerate(runs)]

    @app.get("/dashboard/api/facts", **described(answer=OBJECT, fails=(404,)))
    def facts(run: Annotated[Run, Depends(chosen)]) -> Response:
        """The run's configuration, where its alarms begin, and the stages of a step."""
        return _json(run.facts())

    @app.get("/dashboard/api/series", **described(answer=OBJECT, fails=(404,)))
    def series(
        run: Annotated[Run, Depends(chosen)],
        after: _Step = 0,
        generation: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
        evaluations: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 600,
        first: _Step = 0,
        last: _Step = 2**53 - 1,
    ) -> Response:
        """All numbers of the steps after `after`, or of all; more than `points` steps are put together."""
        return _json(run.series(after, generation, evaluations, points, first, last))

    @app.get("/dashboard/api/steps/{step}", **described(answer=OBJECT, fails=(404,)))
    def one_step(run: Annotated[Run, Depends(chosen)], step: Annotated[int, PathParameter(ge=0, lt=2**53)]) -> Response:
        """One line of `metrics.jsonl`."""
        return _json(run.step(step))

    @app.get("/dashboard/api/health", responses=errors(404))
    async def services(run: Annotated[Run, Depends(chosen)]) -> ServicesHealth:
        """How every service and rollout node is now."""
        if health is None or not run.live:
            return ServicesHealth(asked=False, services=[])
        return ServicesHealth(asked=True, services=await health.ask())


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    @app.get("/dashboard", include_in_schema=False)
    async def home() -> RedirectResponse:
        """To the page."""
        return RedirectResponse("dashboard/")  # relative, since a proxy may put a prefix before it

    @app.get("/dashboard/", include_in_schema=False)
    async def page() -> FileResponse:
        """The page."""
        return FileResponse(_FILES["index.html"], headers=_HEADERS)

    @app.get("/dashboard/static/{name}", include_in_schema=False)
    async def static(name: str) -> FileResponse:
        """A file of the page."""
        if name not in _FILES:
            raise NotFound("the page has no such file", field="name", value=name, remedy="load /dashboard/ again")
        return FileResponse(_FILES[name], headers=_HEADERS)


def _json(content: Any) -> Response:
    """Numbers that are missing (NaN) become null."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
