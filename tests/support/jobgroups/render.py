"""`make jobgroups`: writes the job groups that differ from rlhf-math-jobgroup.yaml by an
overlay.

SkyPilot knows no overlays, so what it launches is written out: `overlays/X.yaml` makes
`rlhf-math-X-jobgroup.yaml`, and a test compares the two. An overlay has, by task, the fields to set
wherever they are in it; a field without a value is removed, and `envs` is merged. `every task` is
for all of them. `new task` is the text of one that the base lacks; it comes before the last.
`without` lists tasks that the group lacks; without the last one, the new task is the primary one.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from common.settings.sources import read_yaml
from tests.support.paths import ROOT

FOLDER = ROOT / "jobgroup"
BASE = FOLDER / "rlhf-math-jobgroup.yaml"
OVERLAYS = sorted((FOLDER / "overlays").glob("*.yaml"))
_BETWEEN = "\n---\n"


def target(overlay: Path) -> Path:
    """Returns the file that an overlay makes."""
    return FOLDER / f"rlhf-math-{overlay.stem}-jobgroup.yaml"


def render(overlay: Path) -> str:
    """Returns the text of the job group that an overlay makes."""
    text = overlay.read_text(encoding="utf-8")
    changes = read_yaml(text)
    header, *documents = BASE.read_text(encoding="utf-8").rstrip().split(_BETWEEN)
    if "new task" in changes:
        documents.insert(-1, changes["new task"].rstrip())
    without = changes.get("without", [])
    documents = [each for each in documents if read_yaml(each)["name"] not in without]

    comment, _, _ = text.partition("\nevery task:")
    _, _, fields = header.partition("\nname: rlhf-math\n")
    if "ppo-trainer" in without:
        last = read_yaml(documents[-1])["name"]
        fields = fields.replace("primary_tasks: [ppo-trainer]  ", f"primary_tasks: [{last}]")
    made = f"# `make jobgroups` made this from overlays/{overlay.name}: change that.\n"
    parts = [f"{comment}\n{made}name: rlhf-math-{overlay.stem}\n{fields}"]
    for document in documents:
        own = changes.get(read_yaml(document)["name"], {})
        parts.append(_changed(document, changes["every task"], own))
    return _BETWEEN.join(parts) + "\n"


def _changed(document: str, for_all: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    shared = for_all.get("envs", {})
    variables = {**shared, **read_yaml(document)["envs"], **shared, **own.get("envs", {})}
    for field, value in {**for_all, **own}.items():
        if field != "envs":
            document = _set(document, field, value)
    volumes = read_yaml(document).get("volumes", {})
    return re.sub(r"(?m)^envs: .*$", "\n".join(_envs(variables, volumes)), document)


def _set(document: str, field: str, value: Any) -> str:
    """Replaces, removes or adds the line of a field."""
    line = rf"(?m)^( *){field}: .*?( +#.*)?$"
    if value is None:
        return re.sub(f"{line}\n", "", document)
    text = _line(field, value)
    if not re.search(line, document):  # a field of the resources
        return document.replace("  cpus:", f"  {text}\n  cpus:")
    return re.sub(line, rf"\g<1>{text}\g<2>", document)


def _envs(variables: Mapping[str, Any], volumes: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of `envs`, which can be left out with those of the volumes."""
    lines = []
    marked = []
    for name, value in variables.items():
        if value is None:
            continue
        on_volume = any(PurePosixPath(value).is_relative_to(mount) for mount in volumes)
        lines.append(f"  {_line(name, value)}{'   # volume' if on_volume else ''}")
        marked.append(on_volume)
    if all(marked):
        yield f"envs: {{{lines[0].strip().replace('   #', '}   #')}"
        return
    yield "envs:"
    yield from lines


def _line(field: str, value: Any) -> str:
    text = yaml.safe_dump({field: value}, default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()[1:-1]


if __name__ == "__main__":
    for each in OVERLAYS:
        target(each).write_text(render(each), encoding="utf-8")
