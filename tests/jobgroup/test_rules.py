"""Delays, secrets, GPUs and ports of tasks, as SkyPilot and this machine have them."""

from pathlib import Path
from typing import Any

import pytest

from jobgroup import spec
from jobgroup.local.placement import _hosts, share_gpus

_TASKS = """
---
{name: trainer, run: 'true', num_nodes: 2, resources: {accelerators: 'H100:2'}, SECRETS}
---
{name: reward, run: 'true', resources: {accelerators: 'H100:1'}}
---
{name: data, run: 'true'}
"""


def group(tmp_path: Path, delay: str = "0", of_file: str = "{}", **given: Any) -> spec.JobGroup:
    header = "{name: demo, execution: parallel, primary_tasks: [trainer], termination_delay: DELAY}"
    text = header.replace("DELAY", delay) + _TASKS.replace("SECRETS", f"secrets: {of_file}")
    (tmp_path / "group.yaml").write_text(text)
    return spec.load(tmp_path / "group.yaml", **given)


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        ("5s", [5, 5, 5]),
        ("{default: 1m}", [60, 60, 60]),
        ("{default: 1m, reward: 2h}", [60, 7200, 60]),
        ("{reward: 3}", [0, 3, 0]),
    ],
)
def test_a_task_without_a_delay_of_its_own_has_the_default(
    tmp_path: Path, delay: str, seconds: list[int]
) -> None:
    tasks = group(tmp_path, delay).tasks
    assert [task.termination_delay_s for task in tasks] == seconds


@pytest.mark.parametrize(
    ("in_file", "given", "value"),
    [
        ("of the file", {}, "of the file"),
        ("", {}, "of this environment"),
        ("of the file", {"env": {"KEY": "of --env"}}, "of --env"),
        ("", {"env": {"KEY": "of --env"}, "secrets": {"KEY": "of --secret"}}, "of --secret"),
    ],
)
def test_a_secret_has_the_value_that_is_nearest(
    tmp_path: Path,
    in_file: str,
    given: dict[str, Any],
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "of this environment")
    task = group(tmp_path, of_file=f"{{KEY: '{in_file}'}}", **given).tasks[0]
    assert task.env["KEY"] == value


@pytest.mark.parametrize("count", range(9))
def test_gpus_are_shared_only_when_there_are_too_few(tmp_path: Path, count: int) -> None:
    tasks = group(tmp_path).tasks
    gpus = [f"gpu-{number}" for number in range(count)]
    shares = share_gpus(tasks, gpus)
    given = [gpu for task in tasks for node in shares[task.name] for gpu in node]
    assert [len(shares[task.name]) for task in tasks] == [2, 1, 1]
    for task in tasks:
        for node in shares[task.name]:
            assert len({*node}) == len(node) == min(task.gpus, count)
    uses = [given.count(gpu) for gpu in gpus]
    assert sum(uses) == len(given)
    assert max(uses, default=0) - min(uses, default=0) <= 1
    assert count < 5 or max(uses) == 1


def test_nodes_at_one_address_never_share_a_port(tmp_path: Path) -> None:
    """Neither do those of any two runs, as on macOS; neighbouring ports of the YAML stay apart."""
    made = group(tmp_path, num_nodes={"trainer": 9, "reward": 9, "data": 9})
    ports = [8000, 8002, 8003, 8006]
    taken: set[int] = set()
    for block in range(100):
        hosts = _hosts(made, block, own_address=False)
        assert {host.address for host in hosts.values()} == {"127.0.0.1"}
        used = {port + host.port_shift for host in hosts.values() for port in ports}
        assert len(used) == len(hosts) * len(ports)
        assert taken.isdisjoint(used)
        taken |= used
