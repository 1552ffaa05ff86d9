"""The tab alone on a page of its own, over real HTTP, in headless Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse
from selenium.webdriver.support.ui import WebDriverWait

import trainer.dashboard
from services.http.app import create_app
from tests.support.browser import Page
from trainer.dashboard.groups import add_groups
from trainer.dashboard.runs import RunReader
from trainer.server import BackgroundServer

FIRST_ANSWER_S = 400
"""For many groups a busy machine takes its time."""
STATIC = Path(trainer.dashboard.__file__).parent / "static"
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>viewer</title>
<link rel="stylesheet" href="static/colours.css"><script type="module" src="static/harness.js"></script></head>
<body><main id="rollouts"></main></body></html>"""
_COLOURS = """:root { --bg: #fff; --fg: #17202b; --muted: #5b6877; --line: #dde3ea; --accent: #2160c4; --good: #147a45;
--bad: #c62a23; --warn: #8f5800 }"""
_HARNESS = """
import { mount } from "./viewer.js";
const callbacks = [];
window.page = { run: 0, step: null, choose(step) { this.step = step; callbacks.forEach((callback) => callback(step)); } };
async function fetchJson(path, parameters = {}) {
  const url = new URL(`api/${path}`, document.baseURI);
  Object.entries(parameters).forEach(([name, value]) => url.searchParams.set(name, value));
  const response = await fetch(url);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}
mount(document.getElementById("rollouts"), {
  run: () => window.page.run, fetchJson, step: () => window.page.step, onStep: (callback) => callbacks.push(callback),
});
"""
_HEADERS = {"content-security-policy": "default-src 'self'"}


@contextmanager
def served(*runs: RunReader) -> Iterator[str]:
    """The address of a page that shows these runs."""
    app = create_app("dashboard")
    add_groups(app, runs)
    texts = {"harness.js": (_HARNESS, "text/javascript"), "colours.css": (_COLOURS, "text/css")}

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/dashboard/")
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    @app.get("/dashboard/static/{name}")
    async def static(name: str) -> Response:
        if name in texts:
            return Response(texts[name][0], media_type=texts[name][1])
        return FileResponse(STATIC / name)

    with BackgroundServer(app, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}/dashboard/"


class Tab:
    """What tests ask of the tab."""

    def __init__(self, page: Page) -> None:
        self.page, self.run = page, page.run

    def text(self, selector: str) -> str:
        """Text of the first such element in the document; empty when there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str, attribute: str = "") -> list[str]:
        """The texts of all such elements, or an attribute of theirs."""
        read = f"e.getAttribute('{attribute}')" if attribute else "e.textContent"
        return list(self.run(f"return [...document.querySelectorAll(arguments[0])].map((e) => {read})", selector))

    @property
    def status(self) -> str:
        """Which groups are shown."""
        return self.text("[role=status]")

    def says(self, status: str) -> None:
        """Waits until these groups are shown."""
        self.page.until(lambda: self.status == status, status)

    def push(self, label: str) -> None:
        """Clicks the button of this name, which is in view then."""
        find = "return [...document.querySelectorAll('button')].find((b) => b.textContent === arguments[0])"
        self.run(f"{find}", label).click()

    def enabled(self, label: str) -> bool:
        return bool(
            self.run(
                "return ![...document.querySelectorAll('button')].find((b) => b.textContent === arguments[0]).disabled", label
            )
        )

    def type(self, name: str, text: str) -> None:
        """Into the field of this name."""
        self.run("document.querySelector(`[name=${arguments[0]}]`).focus()", name)
        self.page.press(text)

    def focus(self, selector: str, index: int = 0) -> None:
        self.run("document.querySelectorAll(arguments[0])[arguments[1]].focus()", selector, index)

    def open(self, index: int = 0) -> None:
        """Clicks a group of the list, and waits until it is shown."""
        self.run("document.querySelectorAll('.viewer-open')[arguments[0]].click()", index)
        self.page.until(lambda: self.text("#viewer-title"), "the group")


@contextmanager
def shown(page: Page, *runs: RunReader, width: int = 1300) -> Iterator[Tab]:
    """The tab over these runs. At the end the console has nothing to say, and no text of a model has become a program."""
    with served(*runs) as url:
        page.open(url, width)
        tab = Tab(page)
        WebDriverWait(page.driver, FIRST_ANSWER_S).until(lambda _: tab.status)
        yield tab
        assert page.errors() == []
        assert page.run("return window.hacked") is None
        page.driver.get("about:blank")  # or it would ask on when nobody answers
