"""`make check-jobgroup YAML=…`: checks that SkyPilot accepts these job groups
and that they can run.

Uses SkyPilot's own loader and schema, offline and in an empty home, so that the result depends only
on the files. Then checks what SkyPilot ignores until pods run: misspelt header fields, scripts that
bash cannot read, tasks that are not restarted, services that end without notice, volumes that
several nodes cannot mount, settings that do not fit the GPUs (`fit.py`). A YAML is checked
as it is, once more without its lines that end in `# volume`, and with the image of the services
(`# image_id: … # image`) switched on. Exit status 0: all valid, possibly with warnings; 1: there
are problems; 2: wrong usage.

Runs in SkyPilot's environment (`make check-jobgroup` makes it), not the project's, in the root of
the repository.
"""

import copy
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.process.cli import CommandParser, fail
from jobgroup.spec import assignments, known_variable
from tests.support.jobgroups.fit import Placed, missing, problems, warnings
from tests.support.paths import ROOT

FOLDER = ROOT / "jobgroup"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VOLUME = re.compile(r"(?m)^.*# volume\n")
_IMAGE = re.compile(r"(?m)^( *)# (image_id: .*# image)$")
_SHARED = {"ReadWriteMany", "ReadOnlyMany"}


class SkyPilot:
    """The parts of SkyPilot used here, imported with an empty home and no network."""

    def __init__(self, home: Path, accelerators: set[str]) -> None:
        for name in [name for name in os.environ if name.startswith(("SKYPILOT_", "SKY_"))]:
            del os.environ[name]
        (home / "project.yaml").touch()  # instead of a .sky.yaml in the current folder
        os.environ |= {
            "HOME": str(home),
            "SKYPILOT_PROJECT_CONFIG": str(home / "project.yaml"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }
        import sky  # type: ignore[import-not-found]
        from sky import clouds, task
        from sky.catalog import common as catalog  # type: ignore[import-not-found]
        from sky.utils import dag_utils, yaml_utils  # type: ignore[import-not-found]
        from sky.volumes import volume  # type: ignore[import-not-found]

        logging.getLogger("sky").setLevel(logging.ERROR)
        self.version: str = sky.__version__
        self.groups = dag_utils
        self.yaml = yaml_utils
        self.Task = task.Task
        self.Kubernetes = clouds.Kubernetes
        self._Volume = volume.Volume
        # GPU names are looked up in a list that SkyPilot would download: here it holds the names
        # the files use.
        known = Path(catalog.get_catalog_path("common/accelerators.csv"))
        known.parent.mkdir(parents=True)
        rows = [f"{name},['Kubernetes']" for name in sorted(accelerators)]
        known.write_text("\n".join(["AcceleratorName,Clouds", *rows, ""]))

    def check_volume(self, content: Any) -> None:
        """Raises what `sky volumes apply` would say about a volume that it refuses."""
        self._Volume.from_yaml_config(content).validate()


class GroupCheck:
    """The check of one job group: its `problems` and `warnings`."""

    def __init__(
        self, sky: SkyPilot, text: str, env: Sequence[tuple[str, str]], volumes: Mapping[str, Any]
    ) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._sky = sky
        self._text = text
        self._env = list(env)
        self._volumes = volumes
        try:
            documents = [document for document in yaml.safe_load_all(text) if document is not None]
            sky.yaml.check_no_duplicate_keys(text)
        except (yaml.YAMLError, ValueError) as error:
            self._add("file", _one_line(error))
            return
        if len(documents) < 2 or not all(isinstance(document, dict) for document in documents):
            problem = "a job group is a header and at least one task, mappings separated by ---"
            self._add("file", problem)
            return
        header, *contents = documents
        self._header(header)
        self._variables(contents)

        tasks = []
        for number, content in enumerate(contents, start=1):
            task = self._task(content, f"task {number}")
            if task is not None:
                tasks.append(task)
                self._scripts(task)
                self._resources(task)
        self._mounts(tasks)

        complete = len(tasks) == len(contents)
        self._fit([_placed(task) for task in tasks], complete=complete)
        if complete and header.get("execution") == "parallel":
            self._group(tasks)

    def _add(self, where: str, what: str) -> None:
        problem = f"{where}: {what}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _header(self, header: dict[str, Any]) -> None:
        known = self._sky.groups._JOB_GROUP_HEADER_FIELDS
        for field in sorted(map(str, header.keys() - known)):
            problem = f"SkyPilot ignores the unknown field {field!r}"
            self._add("header", f"{problem}; known: {', '.join(sorted(known))}")
        if header.get("execution") != "parallel":
            problem = "execution: parallel is missing"
            self._add("header", f"{problem}: SkyPilot would run the tasks one after the other")
        self._name("header", header.get("name"))
        if header.get("inter_connection") is False:
            self._add("header", "inter_connection is off: the tasks cannot find each other by name")

    def _variables(self, contents: Sequence[dict[str, Any]]) -> None:
        for name, _ in self._env:
            if name.startswith("RLHF_"):
                continue  # `problems` checks those
            try:
                known_variable(name, contents, "--env")
            except ConfigError as error:
                self._add("--env", _one_line(error))

    def _name(self, where: str, name: Any) -> None:
        if not (isinstance(name, str) and _LABEL.fullmatch(name)):
            problem = f"the name {name!r} cannot be part of a host name"
            self._add(where, f"{problem}: lower-case letters, digits and -, at most 63")

    def _task(self, content: dict[str, Any], position: str) -> Any:
        """Returns the task as SkyPilot loads it, or None when SkyPilot refuses it."""
        name = content.get("name")
        if not isinstance(name, str):
            self._add(position, f"it has no name (found {name!r})")
            return None
        self._name(name, name)
        secrets = content.get("secrets")
        for key, value in secrets.items() if isinstance(secrets, dict) else ():
            if value:
                problem = f"the secret {key} has its value in the file"
                self._add(name, f"{problem}: leave it empty and give it with --secret {key}")
        try:
            task = self._sky.Task.from_yaml_config(copy.deepcopy(content), self._env)
            task.validate()
        except Exception as error:
            self._add(name, f"SkyPilot refuses it: {_one_line(error)}")
            return None
        if not (task.run or "").strip():
            self._add(name, "run is empty: the task would end at once")
        return task

    def _scripts(self, task: Any) -> None:
        for field, script in (("setup", task.setup), ("run", task.run)):
            fault = shell_fault(script or "")
            if fault:
                self._add(f"{task.name}.{field}", f"bash cannot read it: {fault}")

    def _resources(self, task: Any) -> None:
        for resources in task.resources:
            recovery = resources.job_recovery
            recovery = recovery if isinstance(recovery, dict) else {}
            if (recovery.get("max_restarts_on_errors") or 0) <= 0:
                problem = "SkyPilot does not restart it after an error"
                fix = "set resources.job_recovery.max_restarts_on_errors"
                self._add(task.name, f"{problem}: {fix}")
            if not isinstance(resources.cloud, self._sky.Kubernetes):
                problem = f"resources.infra is {resources.cloud}"
                self._add(task.name, f"{problem}: host names need infra: kubernetes")

    def _mounts(self, tasks: Sequence[Any]) -> None:
        mounting: dict[str, list[Any]] = {}
        for task in tasks:
            for mount, volume in (task.volumes or {}).items():
                name = volume.get("name") if isinstance(volume, dict) else volume
                if name is not None:  # else a volume that exists only as long as its task
                    mounting.setdefault(str(name), []).append(task)
                if not str(mount).startswith("/"):
                    self._add(task.name, f"volumes: the mount path {mount!r} is not absolute")
        for name, users in mounting.items():
            where = ", ".join(task.name for task in users)
            if name not in self._volumes:
                problem = f"there is no file for the volume {name}"
                self._add(where, f"{problem}: name its file with --volume")
                continue
            if self._volumes[name]["type"] == "k8s-hostpath":
                continue  # a folder of one machine, for which access modes mean nothing
            nodes = sum(task.num_nodes for task in users)
            config = self._volumes[name].get("config") or {}
            mode = config.get("access_mode", "ReadWriteOnce")
            if nodes > 1 and mode not in _SHARED:
                problem = f"{nodes} nodes mount the volume {name}, whose access_mode is {mode}"
                self._add(where, f"{problem}: set ReadWriteMany")

    def _fit(self, tasks: Sequence[Placed], complete: bool) -> None:
        for where, what in problems(tasks):
            self._add(where, what)
        for where, what in missing(tasks) if complete else ():
            self._add(where, what)
        self.warnings = [f"{where}: {what}" for where, what in warnings(tasks)]

    def _group(self, tasks: Sequence[Any]) -> None:
        groups = self._sky.groups
        try:
            group = groups.load_job_group_from_yaml_str(self._text, env_overrides=self._env)
            sent_text = groups.dump_job_group_to_yaml_str(group)  # to SkyPilot's server
            groups.load_job_group_from_yaml_str(sent_text)
        except Exception as error:
            self._add("header", f"SkyPilot refuses it: {_one_line(error)}")
            return
        for task in group.tasks:
            primary = group.is_primary_task(task.name)
            if not primary and group.get_termination_delay_secs(task.name) == 0:
                problem = "SkyPilot ends it without delay when the primary tasks succeed"
                self._add(task.name, f"{problem}: set termination_delay")


def _placed(task: Any) -> Placed:
    counts = {math.ceil(sum((each.accelerators or {}).values())) for each in task.resources}
    mounts = task.storage_mounts.items()
    cached = [path for path, storage in mounts if storage.mode.value == "MOUNT_CACHED"]
    return Placed(
        name=task.name,
        nodes=task.num_nodes,
        gpus=tuple(sorted(counts)),
        spot=any(each.use_spot for each in task.resources),
        env=task.envs,
        mounts=(*map(str, task.volumes or {}), *task.storage_mounts),
        uploading=tuple(cached),
        run=task.run or "",
    )


@cache  # the job groups of this project share most scripts
def shell_fault(script: str) -> str:
    """Returns why bash cannot read a script; empty if it can."""
    command = ["bash", "-n"]
    result = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
    return _one_line(result.stderr) if result.returncode else ""


def _one_line(error: object) -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"it cannot be read: {error}", field="YAML", value=str(path), remedy="correct the path"
        ) from None


def _variants(text: str) -> dict[str, str]:
    """Returns a job group as it is, and as the other choices of its marked lines make it, by a name
    for each.
    """
    variants = {"": text}
    without_volumes = _VOLUME.sub("", text)
    if without_volumes != text:
        variants[" (without volumes)"] = without_volumes
    with_image = _IMAGE.sub(r"\1\2", text)
    if with_image != text:
        variants[" (with the image)"] = with_image
    return variants


def _volumes(sky: SkyPilot, texts: Mapping[Path, str]) -> tuple[dict[str, Any], list[str]]:
    """Returns volumes by name, and problems of their files."""
    volumes: dict[str, Any] = {}
    problems = []
    for path, text in texts.items():
        try:
            content = yaml.safe_load(text)
            sky.check_volume(content)
            volumes[content["name"]] = content
        except Exception as error:
            problems.append(f"{path}: SkyPilot refuses it: {_one_line(error)}")
    return volumes, problems


def _accelerators(texts: Iterable[str]) -> set[str]:
    """Returns the words that can be the name of an accelerator, which has a letter and a digit."""
    return set(re.findall(r"[A-Za-z][\w.-]*\d[\w.-]*", "\n".join(texts)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    groups = {}
    try:
        env = list(assignments(options.env, "--env").items())
        for path in options.yaml or sorted(FOLDER.glob("*-jobgroup.yaml")):
            name = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
            groups[name] = _read(path)
        volume_paths = options.volume or sorted((FOLDER / "volumes").glob("*.yaml"))
        volume_texts = {path: _read(path) for path in volume_paths}
    except ConfigError as error:
        fail(error)

    with tempfile.TemporaryDirectory(prefix="check-jobgroup-") as home:
        sky = SkyPilot(Path(home), _accelerators(groups.values()))
        print(f"SkyPilot {sky.version}")
        volumes, problems = _volumes(sky, volume_texts)
        for problem in problems:
            print(f"INVALID {problem}")
        valid = not problems
        for name, content in groups.items():
            for variant, text in _variants(content).items():
                check = GroupCheck(sky, text, env, volumes)
                valid = valid and not check.problems
                _report(f"{name}{variant}", check)
    return 0 if valid else 1


def _parser() -> CommandParser:
    parser = CommandParser(
        "make check-jobgroup", "Checks job-group YAMLs with SkyPilot itself, offline."
    )
    add = parser.add_argument
    groups = "job groups (default: every jobgroup/*-jobgroup.yaml)"
    add("yaml", nargs="*", type=Path, metavar="YAML", help=groups)
    add("--env", action="append", default=[], metavar="K=V", help="as for sky jobs launch")
    volumes = "volumes (default: all of jobgroup/volumes/)"
    add("--volume", action="append", type=Path, metavar="YAML", help=volumes)
    return parser


def _report(name: str, check: GroupCheck) -> None:
    print(name)
    for warning in check.warnings:
        print(f"  WARNING {name}: {warning}")
    for problem in check.problems:
        print(f"  PROBLEM {name}: {problem}")
    if not check.problems:
        print("  VALID")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:
        remedy = "run `make check-jobgroup`, which makes SkyPilot's environment"
        print(f"{error}: {remedy}", file=sys.stderr)
        sys.exit(2)
