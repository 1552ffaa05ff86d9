"""A headless Chromium, and queries for what a person would look for on the page."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 400
_ARGUMENTS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *(
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    ),
    *("--disable-default-apps", "--disable-extensions", "--no-proxy-server"),
)


class Page:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Opens an address in a window of this size."""
        self.driver.get("about:blank")
        self.errors()  # discards those of the previous test
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """Returns the texts of all matching elements, one per line."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText).join('\\n')"
        return str(self.run(script, selector))  # in one script, because elements come and go

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, *keys: str) -> None:
        """Presses keys on the focused element."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key, key))

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def told(_: object) -> bool:
            return bool(condition())

        WebDriverWait(self.driver, PATIENCE_S, 0.1).until(
            told, f"never: {what}; the page says:\n{self.text('body')}"
        )

    def errors(self) -> list[str]:
        """Returns the console's messages of every level."""
        log: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in log]

    def background(self) -> tuple[int, ...]:
        """Returns the colour behind the page."""
        colour: str = self.run("return getComputedStyle(document.body).backgroundColor")
        return tuple(int(part) for part in colour[4:-1].split(","))

    def charts(self) -> dict[str, dict[str, Any]]:
        """Returns for each visible chart, by title, its stated values, the number of drawn pixels
        and the number of colours that fill an area."""
        found: dict[str, dict[str, Any]] = self.run(_CHARTS)
        return found

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))


_CHARTS = """
const drawn = [...document.querySelectorAll(".chart")].filter((c) => c.offsetParent && c.querySelector(".u-over"));
return Object.fromEntries(drawn.map((chart) => {
  const canvas = chart.querySelector("canvas");
  const { left, top, width, height } = chart.querySelector(".u-over").getBoundingClientRect();
  const frame = canvas.getBoundingClientRect();
  const ratio = canvas.width / frame.width;
  const at = [(left - frame.left) * ratio, (top - frame.top) * ratio, width * ratio, height * ratio];
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(...at).data;
  const colours = new Map();
  let drawn = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 200) continue;
    drawn++;
    const colour = data.slice(i, i + 3).join();
    colours.set(colour, (colours.get(colour) ?? 0) + 1);
  }
  const title = chart.querySelector("figcaption b").textContent;
  const areas = [...colours.values()].filter((pixels) => pixels > 200).length;
  return [title, { values: chart.querySelector(".values").innerText, drawn, areas, colours: colours.size }];
}));
"""


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts a browser; skips the test if there is none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as found:
        yield Page(found)
