"""An environment outside the checkout with the wheel installed."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, this environment's dependencies, and foreign packages
    `common` and `benchmarks`."""

    bin: Path
    site_packages: Path
    folder: Path
    """A working directory that is not a checkout and has a foreign package `services`."""

    def run(self, *command: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        """Runs one of the environment's programs in `folder`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONSAFEPATH")
        }
        env = inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        words = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(
            words,
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Runs Python code there."""
        return self.run("python", "-c", code)
