"""Programs in a sandbox of this machine: bubblewrap with a file system, a network and processes of
their own.
"""

import asyncio
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.settings.sections import RuntimeSection
from services.environment.runtimes.gateway_addresses import Gate
from services.environment.runtimes.runtime import (
    EPISODE,
    FIELD,
    Command,
    Container,
    Runtime,
    Spec,
    Variables,
    pack,
    tools_of,
)
from services.sandbox.command import (
    SYSTEM,
    VARIANTS,
    Interpreter,
    base_filter,
    find_bwrap,
    interpreters,
)

DOCKER_FILES = ("Dockerfile", "docker-compose.yaml")
_USER = "60599"
"""The user of programs when the server runs as root, whom no limit of processes stops."""
_WORKDIR = "/app"
_PROBE_S = 10.0
_SOCKET = "/run/gateway.sock"
_OPTIONS = (
    "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
    "--die-with-parent --new-session --cap-drop ALL --uid 0 --gid 0 --hostname sandbox"
)
_FILES = ("/etc/ld.so.cache", "/etc/ssl", "/etc/alternatives", "/etc/localtime")
_USERS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"
_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/root",
    "TMPDIR": "/tmp",  # noqa: S108 - in the sandbox
}
_WITH_FILTER = 'exec 9<"$0"; exec "$@"'
"""The file descriptor survives `exec`; a process started by Python inherits none."""


class SandboxRuntime(Runtime):
    """Runs programs in bubblewrap, in a copy of a task's folder.

    Args:
        section: the settings.
        gateway: URL of this server, which stays valid inside.

    Raises:
        ConfigError: the sandbox does not work here.
    """

    def __init__(self, section: RuntimeSection, gateway: str) -> None:
        super().__init__(gateway)
        self._section = section
        self.gate = Gate(gateway)
        try:
            self.filter = base_filter(internet=True)
            self._bwrap = find_bwrap()
            candidates = interpreters("")
        except ConfigError as error:
            error.field = FIELD
            error.value = "sandbox"
            raise
        self._tools = tools_of(section)
        self._source = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
        self._python = candidates[0]
        self._variant = VARIANTS[0]
        self._select_working(candidates)

    async def start(self, spec: Spec, home: Path) -> Container:
        """Makes the file system of an episode, with the task's files in the working directory."""
        if spec.network == "gateway":
            await self.gate.open_file(home.parent / "gateway.sock")
        workdir = spec.workdir or _workdir_of(spec.build)
        root = await asyncio.to_thread(self._make_root, home, workdir)

        def command(words: Sequence[str], env: Variables) -> Command:
            inside = self._command(words, spec, home, root=root, workdir=workdir)
            return inside, {**_VARIABLES, **spec.env, **env}

        container = Container(home, command)
        if spec.build is not None:
            archive = home / "task.tar"
            await asyncio.to_thread(pack, spec.build, archive, without=DOCKER_FILES)
            await container.put(archive, workdir)
        return container

    async def close(self) -> None:
        """Closes the programs' way to the gateway."""
        await self.gate.close()

    def _command(
        self, words: Sequence[str], spec: Spec, home: Path, *, root: Path, workdir: str
    ) -> list[str]:
        """Returns the command line that runs `words` in the file system `root`."""
        options = _OPTIONS.split()
        if self._variant.disable_userns:
            options.append("--disable-userns")
        options += ["--bind", str(root), "/"]
        for folder in map(Path, SYSTEM):
            if not folder.is_symlink():
                options += ["--ro-bind-try", str(folder), str(folder)]
        for name in (*_FILES, *self._python.folders, *self._tools):
            options += ["--ro-bind-try", name, name]
        if self._variant.proc:
            options += ["--proc", "/proc"]
        options += ["--dev", "/dev"]

        socket = ""
        if spec.network == "gateway":
            options += ["--bind", str(home.parent / "gateway.sock"), _SOCKET]
            socket = _SOCKET
        memory_mb = spec.memory_mb or self._section.memory_mb
        limits = [str(memory_mb << 20), str(self._section.processes)]
        inside = [*limits, socket, self.address, str(self.gate.port), *words]
        user = ["setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups"]
        return [
            *["sh", "-c", _WITH_FILTER, str(home / "filter")],
            *(user if os.geteuid() == 0 else []),
            *[self._bwrap, *options, "--chdir", workdir, "--seccomp", "9", "--"],
            *[self._python.executable, "-I", "-S", "-c", self._source, *inside],
        ]

    @property
    def address(self) -> str:
        """The address inside at which the gateway is reached."""
        return self.gate.host if self.gate.host.startswith("127.") else "127.0.0.1"

    def _make_root(self, home: Path, workdir: str) -> Path:
        """Makes an empty file system, which belongs to the user of the programs."""
        root = Path(tempfile.mkdtemp(prefix="root-", dir=home))
        for folder in ("tmp", "root", "run", "etc", EPISODE.strip("/"), workdir.strip("/")):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for system in map(Path, SYSTEM):
            if system.is_symlink():
                (root / system.name).symlink_to(system.readlink())
        (root / "etc" / "passwd").write_text(_USERS)
        (root / "etc" / "group").write_text(_GROUPS)
        hosts = f"127.0.0.1 localhost\n{self.address} {self.gate.host}\n"
        (root / "etc" / "hosts").write_text(hosts)
        (root / _SOCKET.strip("/")).touch()
        (home / "filter").write_bytes(self.filter)
        if os.geteuid() == 0:
            for parent in (home, home.parent):
                parent.chmod(0o711)
            for path in (root, *root.rglob("*")):
                os.chown(path, int(_USER), int(_USER), follow_symlinks=False)
        return root

    def _select_working(self, candidates: Sequence[Interpreter]) -> None:
        """Selects the first interpreter and variant with which a program runs. Raises
        ConfigError.
        """
        problems = []
        for python, variant in itertools.product(candidates, VARIANTS):
            self._python = python
            self._variant = variant
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder) / "home"
                home.mkdir()
                root = self._make_root(home, _WORKDIR)
                spec = Spec(lifetime_s=_PROBE_S, network="none")
                words = self._command(["true"], spec, home, root=root, workdir="/")
                done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_S)
            if done.returncode == 0:
                return
            problems.append(done.stderr.strip())
        raise ConfigError(
            f"the sandbox does not work on this machine: {problems[0]}; {problems[-1]}",
            field=FIELD,
            value="sandbox",
            remedy="install bubblewrap and setpriv (util-linux), allow unprivileged user "
            "namespaces, and let everyone read the folders of runtime.tools and of Python",
        )


def _workdir_of(build: Path | None) -> str:
    """Returns the working directory that a Dockerfile names."""
    if build is not None and (build / "Dockerfile").is_file():
        text = (build / "Dockerfile").read_text(encoding="utf-8")
        named = re.findall(r"^\s*WORKDIR\s+(/\S+)", text, re.MULTILINE | re.IGNORECASE)
        if named:
            return str(named[-1])
    return _WORKDIR
