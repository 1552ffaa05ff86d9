"""Harbor's tasks are read as Harbor writes them; what episodes cannot play is refused with the
reason.
"""

from pathlib import Path
from typing import Any

import pytest

from common.settings.sections import HARBOR_COLUMN
from services.environment.harbor import HarborTask
from services.environment.outcome import EpisodeFailed

HELLO = """\
version = "1.0"

[metadata]
author_name = "An author"
difficulty = "easy"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 90.0

[environment]
build_timeout_sec = 600.0
docker_image = "registry.example/hello:1"
cpus = 2
memory = "2G"
storage = "10G"
"""
"""As in Harbor's first documentation: `version` and sizes with units."""
LATER = """\
schema_version = "1.4"
artifacts = ["/srv/out", { source = "/srv/db", destination = "db", exclude = ["*.tmp"] }]

[task]
name = "org/hello"
keywords = ["programming"]

[verifier]
environment_mode = "shared"
env = { STRICT = "1" }
user = "root"

[environment]
network_mode = "public"
workdir = "/srv"
memory_mb = 512
gpus = 0

[environment.env]
GREETING = "hello"

[solution.env]
"""


def write(folder: Path, toml: str) -> Path:
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").touch()
    (folder / "task.toml").write_text(toml)
    return folder


def test_a_task_of_the_first_format(tmp_path: Path) -> None:
    task = HarborTask.read({HARBOR_COLUMN: str(write(tmp_path, HELLO))})
    assert (task.image, task.workdir, task.env) == ("registry.example/hello:1", "", {})
    assert (task.cpus, task.memory_mb) == (2, 2048)
    assert (task.timeout_s, task.grader_timeout_s) == (90, 120)
    assert (task.is_shared, task.artifacts, task.grader_env) == (False, (), {})


def test_a_task_of_the_current_format(tmp_path: Path) -> None:
    task = HarborTask.read({HARBOR_COLUMN: str(write(tmp_path, LATER))})
    assert (task.image, task.workdir, task.env) == ("", "/srv", {"GREETING": "hello"})
    assert (task.cpus, task.memory_mb) == (None, 512)
    assert (task.timeout_s, task.grader_timeout_s) == (float("inf"), 600)
    assert (task.is_shared, task.grader_env) == (True, {"STRICT": "1"})
    assert task.artifacts == ("/srv/out", "/srv/db")


REFUSED: dict[str, Any] = {
    '[[steps]]\nname = "one"': "it uses steps",
    '[environment]\nos = "windows"': "it uses environment.os",
    "[environment]\ngpus = 1": "it uses environment.gpus",
    '[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"': "environment.mcp_servers",
    '[environment.healthcheck]\ncommand = "true"': "it uses environment.healthcheck",
    '[agent]\nuser = "agent"': "it uses agent.user",
    "[verifier]\nuser = 1000\n[verifier.environment]\ncpus = 1": "verifier.user, verifier.env",
    '[verifier.env]\nKEY = "${OPENAI_API_KEY}"': "its variable KEY is",
    '[environment.env]\nA = "${A:-b}"': "its variable A is",
    "[environment": "is not a task of Harbor",
    "environment = 3": "is not a task of Harbor",
    '[environment]\nmemory = "much"': "is not a task of Harbor",
}


@pytest.mark.parametrize("toml", REFUSED)
def test_what_episodes_cannot_play_is_refused(toml: str, tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        HarborTask.read({HARBOR_COLUMN: str(write(tmp_path, toml))})
    assert REFUSED[toml] in str(caught.value)


def test_a_folder_that_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailed, match="is not a task of Harbor"):
        HarborTask.read({HARBOR_COLUMN: str(tmp_path)})
    write(tmp_path, "")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(EpisodeFailed, match=r"uses environment/docker-compose.yaml"):
        HarborTask.read({HARBOR_COLUMN: str(tmp_path)})
    (tmp_path / "environment" / "docker-compose.yaml").unlink()
    (tmp_path / "tests" / "test.sh").unlink()
    with pytest.raises(EpisodeFailed, match=r"it has no tests/test.sh"):
        HarborTask.read({HARBOR_COLUMN: str(tmp_path)})
