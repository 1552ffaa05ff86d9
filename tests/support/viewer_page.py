"""The tab "Rollouts" of the real page, over real HTTP, in headless Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.browser import Page
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.runs import RunReader
from trainer.server import BackgroundServer


@contextmanager
def served(*directories: Path) -> Iterator[str]:
    """The address of the page over these run directories."""
    with BackgroundServer(create_dashboard_app([RunReader(directory) for directory in directories]), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}/dashboard/"


class Tab:
    """What tests ask of the tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.run, self.url = page, page.run, url

    def text(self, selector: str) -> str:
        """Text of the first such element in the tab; empty when there is none."""
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str, attribute: str = "") -> list[str]:
        """The texts of all such elements, or an attribute of theirs."""
        read = f"e.getAttribute('{attribute}')" if attribute else "e.textContent"
        found = "[...document.querySelector('#rollouts').querySelectorAll(arguments[0])]"
        return list(self.run(f"return {found}.map((e) => {read})", selector))

    @property
    def address(self) -> str:
        """The part of the address that says what is shown."""
        return str(self.run("return location.hash"))

    def go(self, address: str) -> None:
        """Follows a link to another view of the page."""
        self.run("location.hash = arguments[0]", address)

    @property
    def status(self) -> str:
        """Which groups are listed."""
        return self.text("[role=status]")

    def says(self, status: str) -> None:
        """Waits until these groups are listed."""
        self.page.until(lambda: self.status == status, status)

    def push(self, label: str) -> None:
        """Clicks the button of this name, which is in view then."""
        find = "return [...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === arguments[0])"
        self.run(f"{find}", label).click()

    def enabled(self, label: str) -> bool:
        find = "[...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === arguments[0])"
        return bool(self.run(f"return !{find}.disabled", label))

    def type(self, name: str, text: str) -> None:
        """Into the field of this name, in the place of what it has."""
        self.run("document.querySelector('.viewer-filters details').open = true")
        self.run("const e = document.querySelector(`[name=${arguments[0]}]`); e.focus(); e.select?.()", name)
        self.page.press(text)

    def choose(self, name: str, value: str) -> None:
        """An option of a list."""
        self.page.click(f"#rollouts [name={name}] option[value='{value}']")

    def focus(self, selector: str, index: int = 0) -> None:
        self.run("document.querySelectorAll('#rollouts ' + arguments[0])[arguments[1]].focus()", selector, index)

    def open(self, index: int = 0) -> None:
        """Clicks a group of the list, and waits until it is shown."""
        self.run("document.querySelectorAll('.viewer-open')[arguments[0]].click()", index)
        self.page.until(lambda: self.text("#viewer-title"), "the group")

    def reads(self, number: int) -> None:
        """Waits until this completion is read."""
        self.page.until(lambda: self.text(".reader-card h4").startswith(f"Completion {number} of"), f"completion {number}")


@contextmanager
def shown(page: Page, *directories: Path, width: int = 1300, at: str = "#rollouts", dark: bool = False) -> Iterator[Tab]:
    """The tab over these runs. At the end the console has nothing to say, and no text of a model has become a program."""
    with served(*directories) as url:
        page.open(url + at, width, dark=dark)
        tab = Tab(page, url)
        page.until(lambda: tab.status, "the list")
        yield tab
        assert page.errors() == []
        assert page.run("return window.hacked") is None
        page.driver.get("about:blank")  # or it would ask on when nobody answers
