"""Stands for `docker` and `kubectl`: notes its arguments and runs what they say in bubblewrap.

It tests which calls we make, not what Docker or Kubernetes does with them. An image is a folder
whose files are in /app.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STATE = Path(os.environ.get("FAKE_CONTAINERS", "/nowhere"))


def install(folder: Path) -> None:
    """Writes both programs into a folder."""
    for name in ("docker", "kubectl"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {name} "$@"\n')
        program.chmod(0o755)


def calls(state: Path) -> list[list[str]]:
    """Returns the calls so far: the program and its arguments."""
    return [json.loads(line) for line in (state / "calls").read_text().splitlines()]


def running(state: Path) -> list[str]:
    """Returns the names of the containers that are there."""
    return [path.name for path in state.glob("containers/*")]


def inside(name: str, words: list[str], env: dict[str, str]) -> int:
    """Runs a command in a container."""
    root = STATE / "containers" / name
    made = json.loads((root / ".made").read_text())
    options = ["--bind", str(root), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc"]
    options += ["--dev", "/dev", "--unshare-pid", "--die-with-parent", "--chdir", "/app"]
    for folder in made["volumes"]:
        options += ["--ro-bind", folder, folder]
    variables = {"PATH": "/usr/bin:/bin", **made["env"], **env}
    return subprocess.run(["bwrap", *options, "--", *words], env=variables).returncode


def make(name: str, image: str, made: Mapping[str, object], state: Path = STATE) -> None:
    root = state / "containers" / name
    for folder in ("tmp", "etc"):
        (root / folder).mkdir(parents=True)
    for folder in ("bin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    shutil.copytree(state / "images" / image.replace("/", "_"), root / "app", dirs_exist_ok=True)
    (root / ".made").write_text(json.dumps(made))


def remove(name: str) -> None:
    shutil.rmtree(STATE / "containers" / name, ignore_errors=True)


def labelled(label: str) -> list[str]:
    found = []
    for made in STATE.glob("containers/*/.made"):
        if json.loads(made.read_text())["label"] == label:
            found.append(made.parent.name)
    return found


def values(words: list[str], option: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def assignments(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        if word.startswith("--env="):
            name, _, value = word.removeprefix("--env=").partition("=")
            found[name] = value
    return found


def docker(words: list[str]) -> int:
    command = words[0]
    if words[:2] == ["network", "inspect"]:
        print("127.0.0.1")
    elif command == "ps":
        print("\n".join(labelled(words[-1].removeprefix("label="))))
    elif command == "rm":
        for name in words[2:]:
            remove(name)
    elif words[:2] == ["image", "inspect"]:
        return int(not (STATE / "images" / words[2].replace("/", "_")).exists())
    elif command == "build":
        target = STATE / "images" / values(words, "--tag")[0]
        shutil.copytree(words[-1], target)
    elif command == "run":
        (name,) = values(words, "--name")
        split = words.index("sh")
        volumes = [each.partition(":")[0] for each in values(words, "--volume")]
        label = values(words, "--label")[0]
        made = {"label": label, "env": assignments(words), "volumes": volumes}
        make(name, words[split - 1], made)
        try:
            return inside(name, words[split:], {})
        finally:
            remove(name)
    elif command == "exec":
        rest = [word for word in words[1:] if not word.startswith("--")]
        return inside(rest[0], words[words.index(rest[0]) + 1 :], assignments(words))
    return 0


def kubectl(words: list[str]) -> int:
    command = words[0]
    if words[:2] == ["delete", "pods"]:
        for name in labelled(words[-1]):
            remove(name)
    elif words[:2] == ["delete", "pod"]:
        remove(words[-1])
    elif command == "create":
        manifest = json.load(sys.stdin)
        container = manifest["spec"]["containers"][0]
        labels = manifest["metadata"]["labels"]
        made = {
            "label": f"rlhf-episodes={labels['rlhf-episodes']}",
            "env": {each["name"]: each["value"] for each in container["env"]},
            "volumes": [],
            "args": container["args"],
        }
        make(manifest["metadata"]["name"], container["image"], made)
        (STATE / "manifests").open("a").write(json.dumps(manifest) + "\n")
    elif command == "attach":
        made = json.loads((STATE / "containers" / words[-1] / ".made").read_text())
        try:
            return inside(words[-1], made["args"], {})
        finally:
            remove(words[-1])
    elif command == "exec":
        return inside(words[2], words[4:], {})
    return 0


if __name__ == "__main__":
    with (STATE / "calls").open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    kinds = {"docker": docker, "kubectl": kubectl}
    sys.exit(kinds[sys.argv[1]](sys.argv[2:]))
