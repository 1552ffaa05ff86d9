"""`python -m tests.support.browser.screenshots URL FILE.png [--dark] [--size 1360x900]` takes a screenshot
for the docs."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.support.browser.browser import chromium


def main() -> None:
    """Takes the picture once there are charts, or rows of runs, and the services were polled twice,
    so that rates are known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1360x900")
    arguments = parser.parse_args()
    width, height = (int(part) for part in arguments.size.split("x"))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        chromium(Path(profile)) as page,
    ):
        page.open(arguments.url, width, height, arguments.dark)
        page.until(lambda: page.charts() or page.count("#runs-table tbody tr"), "charts or runs")
        time.sleep(4)
        page.screenshot(arguments.file)
        print(*page.errors(), sep="\n")


if __name__ == "__main__":
    main()
