"""schemathesis sends valid and broken requests, generated from /openapi.json, to every service as a
real process.

The service never hangs, answers as declared, never with 5xx except 503 with Retry-After, and stays
healthy. `make fuzz` runs longer and checks that the service's memory does not grow.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.fuzzed_service import SECONDS, Service, served
from tests.support.services.apps import APPS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600 + 2 * SECONDS)]
EXAMPLES = 12
GROWTH_MB = 60
NOT_CHECKED = (
    "not_a_server_error",  # `no_crash` is stricter about 503 and otherwise the same
    # a schema cannot express that two lists have equal lengths or that a group exists
    "positive_data_acceptance",
    # pydantic reads "1" as a number, and like SGLang, some calls ignore unknown fields
    "negative_data_rejection",
    "allow_header_conformance",  # starlette's 405 names the methods of a path's first route only
)
WAITS = {
    "engine": ("/pause_generation", "/release_memory_occupation", "/init_weights_update_group")
}
"""Calls that make later calls wait, by design."""


def fuzz(service: Service, name: str, seed: int, phases: str, *limits: str) -> None:
    """Runs schemathesis once; fails with its report."""
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{service.url}/openapi.json",
        "--seed",
        str(seed),
        *limits,
    ]
    command += ["--phases", phases, "--mode", "all", "--checks", "all"]
    command += [
        "--exclude-checks",
        ",".join(NOT_CHECKED),
        "--request-timeout",
        "60",
        "--continue-on-failure",
    ]
    command += [
        "--generation-database",
        "none",
        "--no-color",
        "--warnings",
        "off",
        "--max-redirects",
        "0",
    ]
    command += [
        "--header",
        "X-Request-Id: fuzz",
    ]  # without it, a POST may come from a web page (tests/security)
    for path in WAITS.get(name, ()):
        command += ["--exclude-path", path]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.support.processes.schemathesis_hooks",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (
        done.stdout[-8000:] + done.stderr[-2000:] + service.log.read_text()[-4000:]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
def test_generated_requests_harm_no_service(name: str, base_model: Path, tmp_path: Path) -> None:
    with served(name, tmp_path, base_model) as service:
        fuzz(service, name, 0, "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES))
        if SECONDS:
            warm = service.memory_mb()
            fuzz(
                service, name, 1, "fuzzing", "--max-time", str(SECONDS), "--max-examples", "100000"
            )
            assert service.memory_mb() < warm + GROWTH_MB
        assert service.ready()
        assert "Traceback" not in service.log.read_text()
