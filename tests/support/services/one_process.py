"""A program and its test in Python as in the sandbox, but as two threads of this process."""

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from services.sandbox import library_values
from services.sandbox.cases import Case
from services.sandbox.program import Program
from services.sandbox.remote import Test

_MODULES = ("__main__", "pytest", "solution")


class _Ended(BaseException):
    """Where the test's process of the sandbox would be gone."""


def _end_thread(status: int) -> NoReturn:
    raise SystemExit(status)


def outcome(source: str, case: Case) -> str:
    """Returns `passed`, or why a test in Python fails: the status, and the detail of the error."""
    assert case.test is not None, "compared outside the sandbox"
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(source, "<program>", "exec"), namespace)  # noqa: S102
    program_in, test_out = os.pipe()
    test_in, program_out = os.pipe()
    ended: list[str] = []

    def end(status: str, detail: str) -> NoReturn:
        ended.append(f"{status}: {detail}")
        raise _Ended

    program = Program(namespace, program_in, program_out)

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            program.serve()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    with _globals_restored():
        judge = Test(test_in, test_out, limit=1 << 20, end=end)
        try:
            judge.run(case.test["text"], case.test["tests"], source, case.test["entry_point"])
        except _Ended:
            pass
        except BaseException as error:
            ended.append(f"error: {type(error).__name__}: {error}")
        finally:
            # Which ends the program, wherever it waits.
            judge._out.close()
            serving.join()
            for stream in (judge._in, program._in):
                stream.close()
            os.close(program_out)
    return ended[0] if ended else "passed"


@contextlib.contextmanager
def _globals_restored() -> Iterator[None]:
    """A test replaces modules and methods, since the sandbox ends with it."""
    modules = {name: sys.modules.get(name) for name in _MODULES}
    default = json.JSONEncoder.default
    leave = contextlib.suppress.__exit__
    end = os._exit
    words = sys.argv
    sys.argv = ["program"]
    os._exit = _end_thread
    comparisons = {
        (module, name): getattr(importlib.import_module(module), name)
        for module, names in library_values._COMPARISONS.items()
        for name in names
    }
    try:
        yield
    finally:
        sys.argv = words
        os._exit = end
        for (place, name), function in comparisons.items():
            setattr(sys.modules[place], name, function)
        library_values.make_strict.cache_clear()
        json.JSONEncoder.default = default  # type: ignore[method-assign]
        contextlib.suppress.__exit__ = leave  # type: ignore[method-assign]
        for name, module in modules.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
