"""The changes that `make mutants` draws: of code, not of words, and defaults are changed as well."""

import ast
import signal
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from tests.support import mutants, operators
from tests.support.operators import Change
from tests.support.paths import ROOT

PATH = ROOT / "sample.py"


def parsed(source: str) -> ast.Module:
    return ast.parse(textwrap.dedent(source))


def drawn(source: str) -> list[Change]:
    return list(operators.changes(PATH, parsed(source)))


def test_what_only_people_read_is_not_changed() -> None:
    words = '''
        def f(a: "int" = None, *, b: "str" = None) -> "float":
            """Doubles, adds 1 and says so."""
            text: "str"
            log.info("seen %s", a, extra={"b": 2})
            assert a
            cast("int", a)
            raise_with(remedy="call it", help="x", description="y")
            path.read_text(encoding="utf-8")
    '''
    found = [str(change) for change in drawn(words)]
    # The calls themselves may go, and the value that is cast may become None.
    assert [text.partition(": ")[2] for text in found] == [
        "cast('int', a)   ─►   pass",
        "raise_with(remedy='call it', help='x', description='y')   ─►   pass",
        "path.read_text(encoding='utf-8')   ─►   pass",
        "cast('int', a)   ─►   cast('int', None)",
    ]


def test_every_change_can_be_compiled_and_is_undone() -> None:
    path = ROOT / "services/environment/threads.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    before = ast.unparse(tree)
    for change in operators.changes(path, tree):
        with change.made():
            compile(tree, "threads.py", "exec")
            assert ast.unparse(tree) != before, change
    assert ast.unparse(tree) == before


def test_a_changed_default_is_what_calls_get() -> None:
    source = """
        LIMIT = 4
        def f(a, b=2, *, c, d=LIMIT, e=-1):
            return a, b, c, d, e
    """
    tree = parsed(source)
    scope: dict[str, Any] = {}
    exec(compile(tree, "sample.py", "exec"), scope)  # noqa: S102
    function: FunctionType = scope["f"]
    results = []
    for change in operators.changes(PATH, tree):
        owner = operators.function_of_default(change, tree)
        if owner is None:
            continue
        with change.made():
            mutants.set_defaults(function, owner.args)
        results.append(function(0, c=3))
    assert sorted(results) == [(0, 2, 3, 4, -2), (0, 3, 3, 4, -1)]


def test_kernels_whose_text_was_read_are_known() -> None:
    source = """
        @triton.jit
        def kernel(a):
            return a
        @functools.cache
        def f(b):
            return b
    """
    tree = parsed(source)
    found = {
        str(change).partition(": ")[2]: operators.is_in_kernel(change, tree)
        for change in operators.changes(PATH, tree)
    }
    assert found == {"return a   ─►   return None": True, "return b   ─►   return None": False}


def test_what_runs_while_a_module_is_imported_is_known(tmp_path: Path) -> None:
    source = textwrap.dedent(
        """
        def made(n):
            return n + 1
        def later():
            return made(1)
        class Kept:
            table = made(2)
        """
    )
    path = tmp_path / "room.py"
    path.write_text(source)
    plugin = mutants._Mutants([path], 1, 0, is_slow=False)
    traced = sys.gettrace()
    sys.settrace(plugin.imports)
    exec(compile(source, str(path), "exec"), {"__name__": "room"})  # noqa: S102
    sys.settrace(traced)
    assert {name for _, name, _ in plugin._imported} == {"made"}


@pytest.mark.integration
def test_a_test_that_waits_for_ever_has_its_own_time_and_not_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutants, "_WALL_S", 0.1)

    def hangs(begins: mutants._Begins) -> int:
        begins(0)
        signal.pause()
        return 0

    def goes_on(begins: mutants._Begins) -> int:
        for number in range(2):
            begins(number)
        return 0

    assert mutants._fails(hangs, [0.0, 1e6])
    assert not mutants._fails(goes_on, [1e6, 1e6])
