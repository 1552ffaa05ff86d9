"""The "Rollouts" tab of the real page, over real HTTP, in headless Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.browser.browser import Page
from trainer.backends.server import BackgroundServer
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.runs import RunReader


@contextmanager
def served(*directories: Path) -> Iterator[str]:
    """Serves the page for these run directories; yields its address."""
    runs = [RunReader(directory) for directory in directories]
    with BackgroundServer(create_dashboard_app(lambda: runs), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.port}/dashboard/"


class Tab:
    """The tab, with the queries and actions that tests use."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.run, self.url = page, page.run, url

    def text(self, selector: str) -> str:
        """Returns the text of the first matching element; empty if there is none."""
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str, attribute: str = "") -> list[str]:
        """Returns the texts, or an attribute, of all matching elements."""
        read = f"e.getAttribute('{attribute}')" if attribute else "e.textContent"
        found = "[...document.querySelector('#rollouts').querySelectorAll(arguments[0])]"
        return list(self.run(f"return {found}.map((e) => {read})", selector))

    @property
    def address(self) -> str:
        """Returns the fragment of the address, which selects the view."""
        return str(self.run("return location.hash"))

    def go(self, address: str) -> None:
        """Follows a link to another view of the page."""
        self.run("location.hash = arguments[0]", address)

    @property
    def status(self) -> str:
        """Returns the line that says which groups are listed."""
        return self.text("[role=status]")

    def says(self, status: str) -> None:
        """Waits until the list has this status."""
        self.page.until(lambda: self.status == status, status)

    def push(self, label: str) -> None:
        """Scrolls the button with this label into view and clicks it."""
        find = "return [...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === arguments[0])"
        self.run(f"{find}", label).click()

    def enabled(self, label: str) -> bool:
        find = "[...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === arguments[0])"
        return bool(self.run(f"return !{find}.disabled", label))

    def type(self, name: str, text: str) -> None:
        """Replaces the text of the field with this name."""
        self.run("document.querySelector('.viewer-filters details').open = true")
        self.run(
            "const e = document.querySelector(`[name=${arguments[0]}]`); e.focus(); e.select?.()",
            name,
        )
        self.page.press(text)

    def choose(self, name: str, value: str) -> None:
        """Chooses an option of a list."""
        self.page.click(f"#rollouts [name={name}] option[value='{value}']")

    def focus(self, selector: str, index: int = 0) -> None:
        self.run(
            "document.querySelectorAll('#rollouts ' + arguments[0])[arguments[1]].focus()",
            selector,
            index,
        )

    def open(self, index: int = 0) -> None:
        """Clicks a group in the list and waits until it is shown."""
        self.run("document.querySelectorAll('.viewer-open')[arguments[0]].click()", index)
        self.page.until(lambda: self.text("#viewer-title"), "the group")

    def reads(self, number: int) -> None:
        """Waits until this completion is shown."""
        self.page.until(
            lambda: self.text(".reader-card h4").startswith(f"Completion {number} of"),
            f"completion {number}",
        )


@contextmanager
def shown(
    page: Page, *directories: Path, width: int = 1300, at: str = "#rollouts", dark: bool = False
) -> Iterator[Tab]:
    """Opens the tab for these runs; at the end, checks that the console is empty and no model text
    ran as a script."""
    with served(*directories) as url:
        page.open(url + at, width, dark=dark)
        tab = Tab(page, url)
        page.until(lambda: tab.status, "the list")
        yield tab
        assert page.errors() == []
        assert page.run("return window.hacked") is None
        page.driver.get("about:blank")  # otherwise the page would keep polling a dead server
