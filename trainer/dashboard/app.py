"""HTTP app of the dashboard: the page, and the data of runs under `/dashboard/api/`."""

import logging
import mimetypes
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, RedirectResponse
from pydantic import BaseModel, Field

from common.errors import NotFound
from services.http.app import create_app
from services.http.openapi import JSON, OBJECT, described, errors
from trainer.dashboard.groups import add_groups, json_answer
from trainer.dashboard.run_facts import MAX_NOTE_CHARS, write_note
from trainer.dashboard.run_list import Runs, run_at
from trainer.dashboard.runs import Diagnosis, RunReader, RunSummary
from trainer.diagnosis.health import Health, ServiceHealth
from trainer.observe.run_dir import WHY

STATIC = Path(__file__).parent / "static"
_FILES = {file.name: file for file in sorted(STATIC.iterdir()) if file.is_file()}
_STATIC_PATHS = [f"/dashboard/static/{name}" for name in _FILES]
PAGES = frozenset({"/", "/dashboard", "/dashboard/", *_STATIC_PATHS})
"""Paths that need no token: the page holds no data of a run."""
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MAX_POINTS = 5000
_Step = Annotated[int, Query(ge=0, lt=2**53)]
# Some systems map it to text/plain, and browsers refuse such a module.
mimetypes.add_type("text/javascript", ".js")


async def _run_of(request: Request, run: Annotated[int, Query(ge=0, lt=2**31)] = 0) -> RunReader:
    return run_at(request.app.state.runs, run)


AskedRun = Annotated[RunReader, Depends(_run_of)]
"""The run that a call names by its index."""


class ServicesHealth(BaseModel):
    """Answer of `GET /dashboard/api/health`."""

    asked: bool
    """False: this process only reads the run directory; only the running trainer asks the
    services."""
    services: list[ServiceHealth]


class Note(BaseModel):
    """Body of `PUT /dashboard/api/note`."""

    text: str = Field(max_length=MAX_NOTE_CHARS)


def create_dashboard_app(runs: Runs) -> FastAPI:
    """Returns the app that shows run directories, including new steps of runs that other processes
    train.
    """
    quiet = logging.DEBUG  # an open page sends requests all the time
    app = create_app("dashboard", max_body_bytes=1 << 20, open_paths=PAGES, access_level=quiet)
    add_dashboard(app, runs)
    return app


def add_dashboard(app: FastAPI, runs: Runs, health: Health | None = None) -> None:
    """Adds the dashboard to an app whose open paths include `PAGES`."""
    app.state.runs = runs
    _add_page(app)
    add_groups(app, runs)
    _add_health(app, health)
    answers = described(answer=OBJECT, fails=(404,))

    @app.get("/dashboard/api/runs")
    def all_runs() -> list[RunSummary]:
        """Lists the run directories."""
        return [run.summary(i) for i, run in enumerate(runs())]

    @app.get("/dashboard/api/facts", **answers)
    def facts(run: AskedRun) -> Response:
        """Returns the run's configuration, the limits of its alarms, and the stages of a step."""
        return json_answer(run.facts())

    @app.get("/dashboard/api/why", **described(answer={"type": ["object", "null"]}, fails=(404,)))
    def why(run: AskedRun) -> Response:
        """Returns what `rlhf why` found last: `jump`, `causes`, `changes`, and the groups that
        carry the update of `step`; null when nobody has asked.
        """
        path = run.directory / WHY
        found = path.read_bytes() if path.is_file() else b"null"
        return Response(found, media_type=JSON, headers={"cache-control": "no-store"})

    @app.get("/dashboard/api/series", **answers)
    def series(
        run: AskedRun,
        known: Annotated[int, Query(ge=-1, lt=2**53)] = -1,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 600,
        first: _Step = 0,
        last: _Step = 2**53 - 1,
    ) -> Response:
        """Returns all numbers of the steps, merged to at most `points` points, unless the caller
        has the `known` generation.
        """
        return json_answer(run.series(known, points, first=first, last=last))

    @app.get("/dashboard/api/steps/{step}", **answers)
    def one_step(run: AskedRun, step: Annotated[int, PathParameter(ge=0, lt=2**53)]) -> Response:
        """Returns the numbers and notes of one step."""
        return json_answer(run.step(step))

    @app.get(
        "/dashboard/api/csv",
        **described(answer={"type": "string"}, writes=("text/csv",), fails=(404,)),
    )
    def csv(run: AskedRun) -> Response:
        """Returns all numbers of all steps as CSV."""
        return Response(run.csv(), media_type="text/csv", headers={"cache-control": "no-store"})

    @app.put("/dashboard/api/note", responses=errors(404))
    def keep_note(run: AskedRun, note: Note) -> Note:
        """Saves the user's note about a run in `notes.md` of its directory."""
        write_note(run.directory, note.text)
        return note


def _add_health(app: FastAPI, health: Health | None) -> None:
    @app.get("/dashboard/api/diagnosis", responses=errors(404))
    def diagnosis(run: AskedRun) -> Diagnosis:
        """Returns what is wrong with the run, the most important first."""
        return run.diagnosis()

    @app.get("/dashboard/api/health", responses=errors(404))
    async def services(run: AskedRun) -> ServicesHealth:
        """Asks every service and rollout node for its health."""
        if health is None or not run.live:
            return ServicesHealth(asked=False, services=[])
        return ServicesHealth(asked=True, services=await health.ask())


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    @app.get("/dashboard", include_in_schema=False)
    async def home() -> RedirectResponse:
        return RedirectResponse("dashboard/")  # relative, since a proxy may put a prefix before it

    @app.get("/dashboard/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_FILES["index.html"], headers=_HEADERS)

    @app.get("/dashboard/static/{name}", include_in_schema=False)
    async def static(name: str) -> FileResponse:
        if name not in _FILES:
            raise NotFound(
                "the page has no such file",
                field="name",
                value=name,
                remedy="load /dashboard/ again",
            )
        return FileResponse(_FILES[name], headers=_HEADERS)
