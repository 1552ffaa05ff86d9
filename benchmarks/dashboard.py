"""Measures the speed of the dashboard's rollout viewer: `python -m benchmarks.dashboard [--groups
100000]`.

Headless Chromium talks to a separate server. The first part measures the seconds from the URL to
the first list of 100,000 groups, with a cold and a warm server. The second measures the frame rate
while scrolling through a group of 16 completions of 2,000 tokens, all of them shown, as text and
token by token. `requestAnimationFrame` counts the frames while Chromium's own gesture scrolls; 60
per second is the maximum. Needs Debian's `chromium` and `chromium-driver`; uses no GPU.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.command import command_parser
from benchmarks.groups import write_lines
from common.wire.schemas import Completion, Group
from tests.support.browser import Page, chromium
from tests.support.viewer_page import served
from trainer.cli.tiny_base import make_tokenizer
from trainer.observe.group_files import GroupRecorder, RecordedGroup

COMPLETIONS = 16
TOKENS = 2000
EACH = 32
"""Groups per step."""
SPEED = 3000
"""Pixels per second."""
_RECORD = """
window.frames_ = [];
const next = (at) => { window.frames_.push(at); window.frame_ = requestAnimationFrame(next); };
window.frame_ = requestAnimationFrame(next);
"""


def first_list(page: Page, url: str) -> float:
    """Returns the seconds from the URL to the first rows."""
    page.driver.get("about:blank")
    start = time.perf_counter()
    page.driver.get(f"{url}#rollouts")
    while not page.count(".viewer-open"):
        time.sleep(0.005)
    return time.perf_counter() - start


def lists(page: Page, directory: Path, groups: int, rounds: int) -> None:
    """Prints the seconds until the list is shown."""
    write_lines(directory, 1, groups // EACH)
    cold = []
    warm = []
    for _ in range(rounds):
        with served(directory) as url:
            cold.append(first_list(page, url))
            while f"of {groups // EACH * EACH:,}" not in page.text("[role=status]"):
                time.sleep(0.05)
            warm.append(first_list(page, url))
            page.driver.get("about:blank")
    print(
        f"first list of {groups:,} groups: {statistics.median(cold):.2f} s "
        f"with a server that has read nothing, {statistics.median(warm):.2f} s again"
    )


def write_group(directory: Path) -> None:
    """Records one step with one group of sentences with working, formulas and code."""
    rng = np.random.default_rng(0)
    sentence = (
        "How many apples has Dan now? First 8+6=14, then **14** - 3 = 11; "
        "so $x = \\frac{22}{2}$ and `n=11`."
    )
    words = sentence.split()
    tokenizer = make_tokenizer(iter([sentence]))
    tokenizer.save_pretrained(directory / "model")
    completions = []
    for i in range(COMPLETIONS):
        text = ""
        while len(ids := tokenizer(text, verbose=False).input_ids) < TOKENS:
            text += " ".join(rng.permutation(words)) + (".\n\n" if rng.random() < 0.3 else " ")
        ids = np.array(ids[:TOKENS], np.int32)
        completion = Completion(
            token_ids=ids,
            logprobs=-rng.exponential(0.5, TOKENS).astype(np.float32),
            text=tokenizer.decode(ids),
            finish_reason="stop",
            weight_versions=[(1, 0, TOKENS)],
            reward=float(i % 2),
            correct=i % 2 == 1,
        )
        completions.append(completion)
    group = Group(
        id="group-1",
        prompt_id="prompt-1",
        prompt="How many?",
        ground_truth="11",
        prompt_token_ids=np.array([3, 4], np.int32),
        completions=completions,
        position=1,
    )
    shifted = [completion.logprobs + np.float32(0.01) for completion in completions]
    advantages = [np.full(TOKENS, 0.5, np.float32) for _ in completions]
    recorder = GroupRecorder(directory, 1 << 30, 0)
    recorder.step(1, [RecordedGroup(group, advantages, shifted)], [])
    recorder.flush()


def frames(page: Page, url: str, view: str) -> None:
    """Prints the frames per second while scrolling through the whole group."""
    page.open(f"{url}#rollouts", 1400, 900)
    page.until(lambda: page.count(".viewer-open"), "the list")
    start = time.perf_counter()
    page.click(".viewer-open")
    page.until(lambda: page.count(".reader-card"), "the group")
    page.press("a", *(["t"] if view == "tokens" else []))
    page.until(lambda: page.count(".reader-card") == COMPLETIONS, "all completions")
    for more in page.driver.find_elements("css selector", ".viewer-more"):
        page.run("arguments[0].click()", more)
    page.run("return document.body.offsetHeight")
    shown = time.perf_counter() - start
    height = page.run(
        "window.scrollTo(0, 0); return document.documentElement.scrollHeight - innerHeight"
    )
    page.run(_RECORD)
    gesture = {
        "x": 600,
        "y": 500,
        "xDistance": 0,
        "yDistance": -height,
        "speed": SPEED,
        "gestureSourceType": "mouse",
    }
    page.driver.execute_cdp_cmd("Input.synthesizeScrollGesture", gesture)
    at = page.run("cancelAnimationFrame(window.frame_); return window.frames_")
    took = np.diff(np.array(at)) / 1000
    bottom = page.run("return Math.round(scrollY)")
    print(
        f"{COMPLETIONS} × {TOKENS:,} tokens, {view}: shown after {shown:.2f} s; "
        f"{bottom:,} of {height:,} pixels in {took.sum():.1f} s, "
        f"{1 / took.mean():.1f} frames a second, longest frame {1e3 * took.max():.0f} ms, "
        f"{np.mean(took > 1.5 / 60):.1%} of the frames late"
    )


def main() -> None:
    parser = command_parser("dashboard", __doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of the first list; the median counts"
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        for name in ("many", "one"):
            (place / name).mkdir()
        with chromium(place / "profile") as page:
            lists(page, place / "many", arguments.groups, arguments.rounds)
            write_group(place / "one")
            with served(place / "one") as url:
                for view in ("text", "tokens"):
                    frames(page, url, view)
                page.driver.get("about:blank")


if __name__ == "__main__":
    main()
