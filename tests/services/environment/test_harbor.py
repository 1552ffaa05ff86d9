"""Harbor's tasks are read as Harbor writes them; what episodes cannot play is refused with the
reason.
"""

from pathlib import Path
from typing import Any

import pytest

from common.settings.sections import HARBOR_COLUMN
from services.environment.harbor import HarborTask
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.runtime import Spec

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
    spec = task.spec(Spec(lifetime_s=1))
    assert (spec.image, spec.workdir, spec.env) == ("registry.example/hello:1", "", {})
    assert (spec.cpus, spec.memory_mb) == (2, 2048)
    assert (task.settings.agent.timeout_sec, task.settings.verifier.timeout_sec) == (90, 120)
    assert (task.settings.verifier.environment_mode, task.settings.artifacts) == ("", [])


def test_a_task_of_the_current_format(tmp_path: Path) -> None:
    task = HarborTask.read({HARBOR_COLUMN: str(write(tmp_path, LATER))})
    spec = task.spec(Spec(lifetime_s=1, image="registry.example/{task}"))
    assert (spec.image, spec.workdir) == (f"registry.example/{tmp_path.name}", "/srv")
    assert (spec.cpus, spec.memory_mb, spec.env) == (None, 512, {"GREETING": "hello"})
    assert (task.settings.agent.timeout_sec, task.settings.verifier.timeout_sec) == (None, 600)
    verifier = task.settings.verifier
    assert (verifier.environment_mode, verifier.env) == ("shared", {"STRICT": "1"})
    sources = [getattr(each, "source", each) for each in task.settings.artifacts]
    assert sources == ["/srv/out", "/srv/db"]


REFUSED: dict[str, Any] = {
    '[[steps]]\nname = "one"': "$.steps",
    '[environment]\nos = "windows"': "$.environment.os",
    "[environment]\ngpus = 1": "$.environment.gpus",
    '[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"': "$.environment.mcp_servers",
    '[environment.healthcheck]\ncommand = "true"': "$.environment.healthcheck",
    '[agent]\nuser = "agent"': "$.agent.user",
    "[verifier]\nuser = 1000\n[verifier.environment]\ncpus = 1": "$.verifier.",
    '[verifier.env]\nKEY = "${OPENAI_API_KEY}"': "the variable KEY of",
    '[environment.env]\nA = "${A:-b}"': "the variable A of",
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
    with pytest.raises(EpisodeFailed, match=r"has environment/docker-compose.yaml"):
        HarborTask.read({HARBOR_COLUMN: str(tmp_path)})
    (tmp_path / "environment" / "docker-compose.yaml").unlink()
    (tmp_path / "tests" / "test.sh").unlink()
    with pytest.raises(EpisodeFailed, match=r"has no tests/test.sh"):
        HarborTask.read({HARBOR_COLUMN: str(tmp_path)})
