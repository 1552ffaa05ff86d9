"""Which small changes of a room's code do its tests notice?

    make mutants ROOM=trainer/observe [N=40] [SEED=0] [TESTS=tests/trainer/observe] [SLOW=1]

The changes are drawn by a seed from all that `operators` makes in the bodies of functions. Each is
tried in a process of its own, forked after all imports, by the quick tests that reach the changed
function: those that notice nothing are printed. What is only wording is not changed: strings with
a space, log lines, docstrings and annotations.

A function that has made a table while its module was imported has no effect any more, nor has the
text of a kernel that Triton has read: a change of it that nothing has noticed is tried once more by
all tests in a new Python process.

How far it is appears on standard error, with what is left so far.

What a test forks has the change, and counts as reached. Everything happens in a copy of the
checkout, where the changed file has the change, too: the Python processes that a test starts read
it. Which tests start one that reaches the function is not known.
With SLOW=1 the tests of `make test-slow` run as well, and all that may start processes try every
change.

    collect ─► run each test once: which functions does it reach? ─► fork for each change:
               replace the code of the function ─► run its tests ─► has one failed?
"""

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import inspect
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.support import operators
from tests.support.operators import Change
from tests.support.paths import ROOT

_OF_RANKS = [
    "tests/learning/test_divided_experts.py",
    "tests/learning/test_routing.py",
    "tests/learning/test_sharding_rules.py",
    "tests/learning/test_thread_ranks.py",
    "tests/trainer/policy/test_expert_parallel.py",
]
_TESTS = {
    "common/weights": ["tests/trainer/weights", "tests/services/rollout"],
    "jobgroup/doctor": ["tests/jobgroup"],
    "jobgroup/local": [
        "tests/jobgroup/test_group_rules.py",
        "tests/jobgroup/test_local.py",
        "tests/jobgroup/test_local_rules.py",
        "tests/jobgroup/test_node.py",
    ],
    "learning/experts.py": _OF_RANKS,
    "learning/liveness.py": ["tests/learning"],
    "learning/routing.py": _OF_RANKS,
    "learning/sharding.py": _OF_RANKS,
    "services/data/stream.py": ["tests/services/data"],
    "services/replay/store.py": ["tests/services/replay"],
    "trainer/audit": ["tests/trainer/audit", "tests/trainer/observe/test_audit.py"],
    "services/sandbox": ["tests/services/sandbox", "tests/services/reward"],
}
"""The tests of rooms that have no folder or file of tests of the same name."""
_CPU_S = 10
_WALL_S = 20.0
_TIMES = 5
"""What a test of a change may take, in seconds (of the clock: more on a busy machine) and in
multiples of what it took without the change; then the change counts as noticed. In seconds of the
processor all its tests together."""
_NOTICED = 1
_SURVIVED = 77
"""The status of a process whose tests all passed; changed code may end it with 0."""
_COPY = "MUTANTS_IN_A_COPY"
"""Set in the process that works in the copy of the checkout."""
_IN_TEST = 1
_IN_SETUP = 2
_Begins = Callable[[int], None]
_Key = tuple[str, str, int]
"""The file, qualified name and first line of a function."""


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@dataclass
class _Reached:
    """What the tests did without a change."""

    tests: dict[_Key, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The indices of the tests that reach each function."""
    seconds: dict[int, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class _Mutants:
    """A plugin of pytest that tries the changes instead of running the tests."""

    def __init__(self, files: Sequence[Path], count: int, seed: int, *, is_slow: bool) -> None:
        self._files = {str(path) for path in files}
        self._trees = {str(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}
        every = [
            change
            for path, tree in self._trees.items()
            for change in operators.changes(Path(path), tree)
        ]
        self.total = len(every)
        self.drawn = random.Random(seed).sample(every, min(count, len(every)))
        self.survivors: list[tuple[Change, int]] = []
        self._functions: dict[_Key, list[FunctionType]] = defaultdict(list)
        self._is_slow = is_slow
        self._is_setup = False
        self._imported: set[_Key] = set()
        """The functions that ran while the modules were imported."""
        self.words: list[str] = []
        """The options and tests of pytest."""
        # pytest captures what is printed from here on.
        self._progress = os.dup(2)
        self.problem = ""
        """Why no change could be tried; empty if all is well."""

    def imports(self, frame: FrameType, event: str, _: Any) -> None:
        """Notes the functions that run, as a trace of all until the tests are collected."""
        code = frame.f_code
        if code.co_filename in self._files and code.co_flags & inspect.CO_OPTIMIZED:
            self._imported.add(_key(code))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._is_setup = True
        try:
            return (yield)
        finally:
            self._is_setup = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.settrace(None)
        if session.testsfailed:
            self.problem = "a file of tests cannot be collected"
            return True
        # Tests that start processes come last, since the others are quick.
        session.items.sort(key=_may_start_processes)
        session.config.pluginmanager.unregister(name="terminalreporter")
        for path in self._files:
            name = ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)
            importlib.import_module(name.removesuffix(".__init__"))
        gc.unfreeze()
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename in self._files:
                self._functions[_key(each.__code__)].append(each)
        tmp_path_factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        tmp_path_factory.getbasetemp()  # one for all the processes
        answer = _in_a_child(lambda: self._reached(session))
        if not answer:
            self.problem = "the process that ran the tests without a change has died"
            return True
        reached: _Reached = pickle.loads(answer)  # noqa: S301
        if reached.failed:
            self.problem = f"without a change these fail: {', '.join(reached.failed)}"
            return True
        if not self._sees(session, reached):
            self.problem = "these tests do not run the code that is changed"
            return True
        for number, change in enumerate(self.drawn):
            tests = self._tests(session, change, reached)
            with self._on_disk(change, number):
                is_noticed = bool(tests) and self._notices(session, change, tests, reached)
                if not is_noticed and self._has_done_its_work(change):
                    is_noticed = self._fails_anew(sum(reached.seconds.values()))
            if not is_noticed:
                self.survivors.append((change, len(tests)))
            # A count that is stopped has not been for nothing.
            noticed = f"{number + 1 - len(self.survivors)} of the first {number + 1} noticed"
            left = "" if is_noticed else f"; left: {change}"
            os.write(self._progress, f"{noticed}{left}\n".encode())
        return True

    def _has_done_its_work(self, change: Change) -> bool:
        """Returns whether a changed function was used while its module was imported."""
        is_in_kernel = operators.is_in_kernel(change, self._trees[str(change.path)])
        return is_in_kernel or not self._imported.isdisjoint(self._changed(change))

    def _reached(self, session: pytest.Session) -> bytes:
        """Runs every test once; returns what each reaches."""
        found = _Reached()
        keys = [_key(code) for code in self._all_codes()]
        numbers = {key: number for number, key in enumerate(keys)}
        # Shared with the processes that a test forks. Those that it executes are not seen.
        seen = mmap.mmap(-1, len(keys))
        by_file = defaultdict(set)
        for index, item in enumerate(session.items):
            by_file[item.path].add(index)

        for index, item in enumerate(session.items):

            def saw(frame: FrameType, event: str, _: Any) -> None:
                if frame.f_code.co_filename in self._files:
                    number = numbers.get(_key(frame.f_code))
                    if number is not None:
                        seen[number] |= _IN_SETUP if self._is_setup else _IN_TEST

            began = time.perf_counter()
            threading.settrace(saw)
            sys.settrace(saw)
            _run(session, [index])
            sys.settrace(None)
            threading.settrace(None)
            for number, key in enumerate(keys):
                if seen[number]:
                    # A fixture may be shared by the tests of a file.
                    is_shared = seen[number] & _IN_SETUP
                    found.tests[key] |= by_file[item.path] if is_shared else {index}
                    seen[number] = 0
            found.seconds[index] = time.perf_counter() - began
            if session.testsfailed:
                session.testsfailed = 0
                found.failed.append(item.nodeid)
        found.tests = dict(found.tests)
        return pickle.dumps(found)

    def _all_codes(self) -> Iterator[CodeType]:
        """Yields the code of every file, and of all functions in it."""
        for path, tree in self._trees.items():
            yield from _codes(compile(tree, path, "exec"))

    def _tests(self, session: pytest.Session, change: Change, reached: _Reached) -> list[int]:
        """Returns the tests that may notice a change, in their order."""
        found = set[int]()
        for key in self._changed(change):
            found |= reached.tests.get(key, set())
        others = set[int]()
        if self._is_slow:
            others = {n for n, item in enumerate(session.items) if _may_start_processes(item)}
        return _quick_first(session.items, found, reached) + sorted(others - found)

    @contextlib.contextmanager
    def _on_disk(self, change: Change, number: int) -> Iterator[None]:
        """The file has the change inside this context."""
        path = change.path
        original = path.read_bytes()
        times = path.stat()
        with change.made():
            path.write_text(ast.unparse(self._trees[str(path)]), encoding="utf-8")
        # Python takes a compiled file for that of a source of the same second and size.
        os.utime(path, (number, number))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _changed(self, change: Change) -> dict[_Key, CodeType]:
        """Returns the new code of the functions that a change makes different."""
        tree = self._trees[str(change.path)]
        before = compile(tree, str(change.path), "exec")
        with change.made():
            after = compile(tree, str(change.path), "exec")
        known = {_key(code): code for code in _codes(before)}
        found = {}
        for code in _codes(after):
            old = known.get(_key(code))
            if old is not None and old != code and code.co_name != "<module>":
                found[_key(code)] = code
        # A default belongs to the function's object: its code stays the same.
        function = operators.function_of_default(change, tree)
        if function is not None:
            first = min([function, *function.decorator_list], key=lambda node: node.lineno)
            for key, code in known.items():
                if key[2] == first.lineno and code.co_name == function.name:
                    found[key] = code
        return found

    def _notices(
        self, session: pytest.Session, change: Change, tests: list[int], reached: _Reached
    ) -> bool:
        codes = self._changed(change)
        changed = operators.function_of_default(change, self._trees[str(change.path)])

        def run(begins: _Begins) -> int:
            # The functions exist already, and may have been handed on: only their code changes.
            with change.made():
                for key, code in codes.items():
                    for function in self._functions[key]:
                        function.__code__ = code
                        if changed is not None:
                            set_defaults(function, changed.args)
            return _run(session, tests, begins)

        return _fails(run, [reached.seconds[index] for index in tests])

    def _fails_anew(self, seconds: float) -> bool:
        """Returns whether the tests, which took `seconds`, fail in a new process."""
        command = [sys.executable, "-m", "pytest", "-x", *self.words]
        limit = 3 * _WALL_S + _TIMES * seconds
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0

    def _sees(self, session: pytest.Session, reached: _Reached) -> bool:
        """Returns whether the tests fail when every function raises that one of them reaches."""
        broken = compile("def broken(): raise AssertionError('planted')", "planted", "exec")
        code = next(_codes(broken.co_consts[0]))

        def run(begins: _Begins) -> int:
            for key in reached.tests:
                for function in self._functions[key]:
                    if not function.__closure__:
                        function.__code__ = code.replace(co_qualname=key[1])
            return _run(session, range(len(session.items)), begins)

        # Most tests fail at once, but some wait for what will never come.
        return _fails(run, [min(_CPU_S, seconds) for _, seconds in sorted(reached.seconds.items())])


def set_defaults(function: FunctionType, arguments: ast.arguments) -> None:
    """Gives a function the defaults of its changed source."""

    def evaluated(node: ast.expr) -> Any:
        code = compile(ast.Expression(node), function.__code__.co_filename, "eval")
        return eval(code, function.__globals__)  # noqa: S307

    if arguments.defaults:
        function.__defaults__ = tuple(map(evaluated, arguments.defaults))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = {argument.arg: evaluated(node) for argument, node in named if node is not None}
    function.__kwdefaults__ = found or None


def _quick_first(items: Sequence[pytest.Item], tests: set[int], reached: _Reached) -> list[int]:
    """Returns the tests by what their files take: most changes are noticed by any of them. Those of
    a file stay together, since they may share what a fixture makes.
    """
    seconds: dict[Path, float] = defaultdict(float)
    for index in tests:
        seconds[items[index].path] += reached.seconds[index]

    def rank(index: int) -> tuple[bool, float, int]:
        item = items[index]
        return _may_start_processes(item), seconds[item.path], index

    return sorted(tests, key=rank)


def _may_start_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("integration") is not None


def _run(
    session: pytest.Session, tests: Sequence[int], begins: _Begins = lambda number: None
) -> int:
    """Runs tests of a session, until one fails. Calls `begins` before each, with how many went
    before.
    """
    for number, (index, after) in enumerate(zip(tests, [*tests[1:], None], strict=True)):
        begins(number)
        item = session.items[index]
        following = None if after is None else session.items[after]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return _NOTICED
    return 0


def _silenced() -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)


def _in_a_child(work: Callable[[], bytes]) -> bytes:
    """Returns what a forked process computes, so that this one stays as it was."""
    source, target = os.pipe()
    child = os.fork()
    if not child:
        _silenced()
        with os.fdopen(target, "wb") as output:
            output.write(work())
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as result:
        found = result.read()
    os.waitpid(child, 0)
    return found


def _fails(run: Callable[[_Begins], int], seconds: Sequence[float]) -> bool:
    """Returns whether tests fail, or one of them takes far longer than its `seconds`, in a forked
    process.
    """
    # Among so many processes, what takes no longer than usual may have to wait for a processor.
    crowded = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    # One test that waits for what will never come does not have the time of all.
    end = memoryview(mmap.mmap(-1, 8)).cast("d")

    def begins(number: int) -> None:
        end[0] = time.monotonic() + crowded * _WALL_S + _TIMES * seconds[number]

    begins(0)
    child = os.fork()
    if not child:
        os.setsid()
        _silenced()
        limit = _CPU_S + round(_TIMES * sum(seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        has_failed = True
        with contextlib.suppress(BaseException):
            has_failed = run(begins) == _NOTICED
        os._exit(_NOTICED if has_failed else _SURVIVED)
    while time.monotonic() < end[0]:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != _SURVIVED
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def files_of(rooms: Sequence[str]) -> list[Path]:
    """Returns the Python files of folders and files."""
    found = []
    for room in rooms:
        place = ROOT / room
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return found


def tests_of(room: str) -> list[str]:
    """Returns the tests of a folder or of a file."""
    if room in _TESTS:
        return _TESTS[room]
    path = Path(room)
    folder = Path("tests") / path.parent / path.stem
    for place in (folder, folder.with_name(f"test_{path.stem}.py"), folder.parent):
        if (ROOT / place).exists():
            return [str(place)]
    raise SystemExit(f"no tests of {room}: name them with TESTS=…")


def _in_a_copy() -> int:
    """Runs this command in a copy of what is checked out here; returns its status."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    tracked = {Path(name).parts[0] for name in listed.stdout.decode().splitlines()}
    with TemporaryDirectory(prefix="mutants-") as folder:
        for name in tracked:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder) / name, symlinks=True)
            else:
                shutil.copy2(ROOT / name, folder)
        for name in (".venv", ".cache"):
            (Path(folder) / name).symlink_to((ROOT / name).resolve())
        command = [sys.executable, "-m", "tests.support.mutants", *sys.argv[1:]]
        environment = os.environ | {"PYTHONPATH": folder, _COPY: "1"}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main() -> None:
    """Prints the changes that no test notices, and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+", help="folders or files")
    parser.add_argument("--tests", nargs="*", help="tests that are to notice the changes")
    parser.add_argument("--count", type=int, default=40, help="changes that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    arguments = parser.parse_args()
    if _COPY not in os.environ:
        raise SystemExit(_in_a_copy())

    os.chdir(ROOT)
    files = files_of(arguments.rooms)
    mutants = _Mutants(files, arguments.count, arguments.seed, is_slow=arguments.slow)
    tests = arguments.tests or functools.reduce(list.__add__, map(tests_of, arguments.rooms))
    options = ["-q", "--tb=no", "-n", "0", "-m", "not long" if arguments.slow else "not slow"]
    mutants.words = [*options, *dict.fromkeys(tests)]
    sys.settrace(mutants.imports)
    status = pytest.main(mutants.words, plugins=[mutants])
    if status or mutants.problem:
        raise SystemExit(mutants.problem or int(status))
    for change, reaching in sorted(mutants.survivors, key=lambda each: str(each[0])):
        print(f"{change}   [{reaching or 'no'} tests]")
    drawn = len(mutants.drawn)
    noticed = drawn - len(mutants.survivors)
    used = sum(
        getattr(resource.getrusage(who), kind)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for kind in ("ru_utime", "ru_stime")
    )
    rooms = " ".join(arguments.rooms)
    print(f"{rooms}: {noticed} of {drawn} noticed, of {mutants.total} in all; {used:.0f} CPU s")


if __name__ == "__main__":
    main()
