"""Measures programs per second in the sandbox of code rewards, compared with a bare, unprotected
Python process.

    python -m benchmarks.sandbox [--programs 100]

Each program reads two numbers and prints their sum; every verdict is checked.
"""

import logging
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.command import command_parser
from common.errors import ConfigError
from services.sandbox.case_formats import parse_cases
from services.sandbox.cases import Case
from services.sandbox.sandbox import Limits, Sandbox

SOURCE = "a, b = map(int, input().split())\nprint(a + b)"


def bare(case: Case) -> bool:
    """Runs the same program and case in a process of the system's Python."""
    command = ["/usr/bin/python3", "-I", "-S", "-c", SOURCE]
    done = subprocess.run(command, input=case.request["input"], capture_output=True, text=True)
    return bool(done.stdout.strip() == case.expected.strip())


def measured(run: Callable[[int], bool], programs: int, at_once: int) -> tuple[float, list[float]]:
    """Returns (programs per second, seconds of each program)."""

    def timed(i: int) -> float:
        start = time.perf_counter()
        assert run(i), "a wrong verdict"
        return time.perf_counter() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        latencies = list(threads.map(timed, range(programs)))
    return programs / (time.perf_counter() - start), latencies


def main() -> None:
    """Prints a row for each number of slots and of cases."""
    parser = command_parser("benchmarks.sandbox", __doc__)
    parser.add_argument("--programs", type=int, default=100)
    programs = parser.parse_args().programs
    logging.disable(logging.INFO)
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {programs} programs each")
    print(f"{'':32}{'programs/s':>12}{'cases/s':>10}{'p50 ms':>9}{'p99 ms':>9}")
    for slots in (1, 2, 8):
        try:
            sandbox = Sandbox(Limits(5.0, 512, 64), slots)
        except ConfigError as error:
            print(f"not measured: {error}")
            return
        for count in (1, 10):
            cases = parse_cases(
                [{"input": f"{i} {i + 1}", "output": str(2 * i + 1)} for i in range(count)]
            )

            def run(_: int, sandbox: Sandbox = sandbox, cases: list[Case] = cases) -> bool:
                return all(result.status == "passed" for result in sandbox.run(SOURCE, cases))

            rate, latencies = measured(run, programs, slots)
            report(f"sandbox, {slots} slots, {count} cases", count, rate, latencies=latencies)
        case = parse_cases([{"input": "3 4", "output": "7"}])[0]

        def run_bare(_: int, case: Case = case) -> bool:
            return bare(case)

        rate, latencies = measured(run_bare, programs, slots)
        report(f"bare Python, {slots} at once", 1, rate, latencies=latencies)


def report(name: str, cases: int, rate: float, *, latencies: list[float]) -> None:
    """Prints a row."""
    p50 = statistics.median(latencies)
    p99 = sorted(latencies)[int(len(latencies) * 0.99) - 1]
    print(f"{name:32}{rate:12,.1f}{rate * cases:10,.1f}{1000 * p50:9.1f}{1000 * p99:9.1f}")


if __name__ == "__main__":
    main()
