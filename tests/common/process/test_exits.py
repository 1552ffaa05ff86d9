"""Words for how a process ended, against processes that really end."""

import subprocess

import pytest

from common.process.exits import how_ended


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "ended with status 3"),
        ("exit 0", "ended with status 0"),
        ("kill -TERM $$", "was killed by SIGTERM (status 143)"),
        ("kill -KILL $$", "was killed by SIGKILL (status 137; the kernel does so"),
        ("exit 137", "was killed by SIGKILL (status 137; "),  # what a shell says of its child
        ("exit 255", "ended with status 255"),
    ],
)
def test_a_signal_has_its_name_and_a_status_its_number(script: str, words: str) -> None:
    ended = subprocess.run(["bash", "-c", script], check=False)
    assert how_ended(ended.returncode).startswith(words)
