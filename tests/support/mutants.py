"""Which changes of the code do the tests of a room notice?

    make mutants ROOM=trainer/observe [COUNT=60] [SEED=0]
    python -m tests.support.mutants common/process/run_lock.py --tests tests/common/process

mutmut makes the mutants and runs the tests that reach each of them, in a copy of the repository.
Those that survive are printed as diffs; the last line has the score.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

_TIMEOUT = "10.0"
"""So many times as long as its tests a mutant may take, before it counts as noticed."""
_SURVIVED = ("🙁", "🫥")
"""How mutmut marks a mutant that no test notices or reaches."""


def copied(target: Path) -> None:
    """Copies the files of the repository as they are, and links its caches."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    (target / "mutants").mkdir()
    (target / "mutants" / ".cache").symlink_to(ROOT / ".cache")


def tests_of(room: Path) -> str:
    """Returns the tests of a folder or of a file."""
    folder = Path("tests") / room.parent / room.stem
    file = folder.with_name(f"test_{room.stem}.py")
    for place in (folder, file, folder.parent):
        if (ROOT / place).exists():
            return str(place)
    raise SystemExit(f"no tests of {room}: name them with --tests")


def configure(target: Path, room: Path, tests: list[str]) -> None:
    package = room.parts[0]
    only = str(room) if room.suffix else f"{room}/*"
    others = [path.name for path in target.iterdir() if path.name not in (package, "mutants")]
    lists = {
        "source_paths": [package],
        "only_mutate": [only],
        "also_copy": others,
        "pytest_add_cli_args": ["-m", "not integration and not slow", "-p", "no:xdist"],
        "pytest_add_cli_args_test_selection": tests,
    }
    lines = ["[mutmut]", f"timeout_multiplier = {_TIMEOUT}"]
    for name, values in lists.items():
        lines.append("\n    ".join([f"{name} =", *values]))
    (target / "setup.cfg").write_text("\n".join(lines))


_SHOW = """
import sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
for name in sys.argv[1:]:
    print(get_diff_for_mutant(name))
"""


def run(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with what it would import in the copy."""
    paths = [str(target / "mutants"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=target,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def names_of_all(target: Path) -> list[str]:
    """Makes the mutants, and runs the tests once to see what each reaches."""
    made = run(target, "-m", "mutmut", "run", "--max-children", "1", "none")
    found: list[str] = []
    for path in (target / "mutants").rglob("*.py.meta"):
        found += json.loads(path.read_text())["exit_code_by_key"]
    if "nothing matches" not in made.stderr or not found:
        raise SystemExit(made.stdout[-4000:] + made.stderr[-4000:])
    return sorted(found)


def main() -> None:
    """Prints the mutants that survive, and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", type=Path)
    parser.add_argument("--tests", nargs="*", help="tests that are to notice them")
    parser.add_argument("--count", type=int, default=60, help="mutants that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        target = Path(directory)
        copied(target)
        configure(target, arguments.room, arguments.tests or [tests_of(arguments.room)])
        names = names_of_all(target)
        count = min(arguments.count, len(names))
        drawn = random.Random(arguments.seed).sample(names, count)
        results = run(target, "-m", "mutmut", "run", "--max-children", "1", *drawn)
        lines = results.stdout.splitlines()
        survivors = [line.split()[-1] for line in lines if line.startswith(_SURVIVED)]
        if results.returncode:
            raise SystemExit(results.stdout[-4000:] + results.stderr[-4000:])
        print(run(target, "-c", _SHOW, *survivors).stdout)
        noticed = count - len(survivors)
        print(f"{arguments.room}: {noticed} of {count} noticed, of {len(names)} mutants in all")


if __name__ == "__main__":
    main()
