"""The local runner decides as SkyPilot would: environments, results, restarts, delays, output."""

import resource
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from common.process.run_lock import LOCK
from common.process.topology import parse_hosts

pytestmark = pytest.mark.integration

if TYPE_CHECKING:
    from tests.support.processes.local_run import LocalRun

HEADER = "name: small\nexecution: parallel\nprimary_tasks: [main]\n"


def test_every_node_gets_the_environment_of_its_pod(local: "LocalRun") -> None:
    show = 'printf "%s|" "$SKYPILOT_JOBGROUP_NAME" "$SKYPILOT_NODE_RANK" "$SKYPILOT_NUM_NODES" $SKYPILOT_NODE_IPS "$A" "$B"'
    more = '; echo "$SKYPILOT_NUM_GPUS_PER_NODE|$SKYPILOT_TASK_ID|$OMP_WAIT_POLICY|$JOBGROUP_HOSTS"'
    task = f"num_nodes: 2\nenvs: {{A: x, B: literal $HOME}}\nrun: '{show}{more}'\n"
    # With one primary task, its end could stop the other task before that one has printed anything.
    header = HEADER.replace("[main]", "[main, other]")
    status, _, _ = local.run(
        f"{header}---\nname: main\n{task}---\nname: other\n{task}",
        "--env",
        "A=y=z",
        "--num-nodes",
        "other=3",
    )
    assert status == 0
    addresses = set()
    for name, count in (("main", 2), ("other", 3)):
        for rank in range(count):
            fields = local.log(f"{name}-{rank}").strip().split("|")
            assert fields[:3] == ["small", str(rank), str(count)]
            ips, rest = fields[3 : 3 + count], fields[3 + count :]
            assert rest[:3] == ["y=z", "literal $HOME", "0"]
            assert rest[3].endswith(f"_small_{name}")
            assert rest[4] == "passive"
            hosts = parse_hosts(rest[5])
            assert len(hosts) == 5
            assert hosts[f"{name}-{rank}.small"].address == ips[rank]
            addresses.add(ips[rank])
    assert len(addresses) == 5
    assert all(address.startswith("127.") for address in addresses)


def test_a_run_that_takes_a_token_gets_one(
    local: "LocalRun", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("API_TOKEN", raising=False)
    text = "run: echo token=$API_TOKEN\n"
    header = HEADER.replace("main", "a, b")
    group = (
        header
        + f"---\nname: a\nsecrets: {{API_TOKEN: ''}}\n{text}---\nname: b\nsecrets: {{API_TOKEN: ''}}\n{text}"
    )
    status, out, _ = local.run(group)
    file = local.logs / "api_token"
    made = file.read_text()
    assert (status, len(made), file.stat().st_mode & 0o777) == (0, 32, 0o600)
    assert [local.log(node).strip() for node in ("a-0", "b-0")] == [f"token={made}"] * 2
    assert f"API_TOKEN of this run: {made}, also in {file}" in out
    for option in ("--secret", "--env"):
        _, out, _ = local.run(group, option, "API_TOKEN=given-0123456789")
        assert local.log("a-0").strip() == "token=given-0123456789"
        assert "API_TOKEN of this run" not in out
    trainer = 'run: "echo as python -m trainer"\n'
    header = HEADER.replace("main", "ppo-trainer")
    _, out, _ = local.run(f"{header}---\nname: ppo-trainer\nsecrets: {{API_TOKEN: ''}}\n{trainer}")
    assert file.read_text() != made
    assert f":8004/dashboard/#token={file.read_text()}\n" in out


def test_primaries_decide_and_auxiliaries_get_sigterm_after_the_delay(local: "LocalRun") -> None:
    auxiliary = (
        "trap 'echo told; touch $FOLDER/{0}-told; exit 0' TERM; touch $FOLDER/{0}; "
        "while true; do [ -e $FOLDER/quick-told ] && touch $FOLDER/{0}-lives-on; sleep 0.05; done"
    )
    status, out, _ = local.run(
        HEADER
        + "termination_delay: {default: 3s, quick: 0s}\n"
        + f'---\nname: slow\nrun: "{auxiliary.format("slow")}"\n---\nname: quick\nrun: "{auxiliary.format("quick")}"\n'
        + "---\nname: main\nrun: until [ -e $FOLDER/slow -a -e $FOLDER/quick ]; do sleep 0.02; done; echo trained\n"
    )
    assert status == 0
    assert "told" in local.log("slow-0")
    assert "told" in local.log("quick-0")
    assert "told" not in out, "what a service says when it is ended is in its log"
    assert (local.folder / "slow-lives-on").exists()  # according to the nodes themselves
    assert not (local.folder / "quick-lives-on").exists()
    assert [line.split()[2] for line in out.splitlines()[-3:]] == [
        "STOPPED",
        "STOPPED",
        "SUCCEEDED",
    ]
    assert local.marked() == []


def test_a_failed_primary_ends_the_auxiliaries_at_once_with_its_status(local: "LocalRun") -> None:
    status, out, _ = local.run(
        HEADER
        + "termination_delay: 10m\n---\nname: other\nrun: sleep 600\n---\nname: main\nrun: echo broken; exit 7\n"
    )
    assert status == 7
    assert "main-0 ended with status 7: main FAILED after 0 restarts" in out
    assert local.marked() == []


def test_a_failed_task_is_restarted_whole_at_the_same_addresses(local: "LocalRun") -> None:
    script = (
        'echo "start $SKYPILOT_NODE_IPS" | tr "\\n" " "; n=$(ls $FOLDER | grep -c once-$SKYPILOT_NODE_RANK); '
        "touch $FOLDER/once-$SKYPILOT_NODE_RANK-$n; "
        'if [ $SKYPILOT_NODE_RANK = 1 -a $n -lt 2 ]; then echo "failure $n"; '
        "until [ -e $FOLDER/once-0-$n ]; do sleep 0.02; done; exit 5; fi; [ $n -ge 2 ] || sleep 600"
    )
    task = "num_nodes: 2\nresources: {job_recovery: {max_restarts_on_errors: 2}}"
    status, out, _ = local.run(f"{HEADER}---\nname: main\n{task}\nrun: |\n  {script}\n")
    assert status == 0, out
    assert "restart 1 of main" in out
    assert "restart 2 of main" in out
    for rank in (0, 1):
        starts = [
            line
            for line in local.log(f"main-{rank}").replace("start", "\nstart").splitlines()
            if "start" in line
        ]
        assert len(starts) == 3  # node 0 too, though only node 1 failed
        assert len({line.split("failure")[0].strip() for line in starts}) == 1


def test_an_auxiliary_beyond_its_restarts_ends_the_group_and_its_output_comes_last(
    local: "LocalRun",
) -> None:
    """The primary task would wait for it (`sleep 600`). It fails only after another auxiliary has
    succeeded."""
    pid = local.folder / "pid"
    fine_ended = f"[ -s {pid} ] && ! kill -0 $(cat {pid}) 2>/dev/null"
    status, out, _ = local.run(
        HEADER
        + "---\nname: flaky\nresources: {job_recovery: {max_restarts_on_errors: 1}}\n"
        + f"run: |\n  until {fine_ended}; do sleep 0.1; done\n  echo its last words; exit 4\n"
        + f"---\nname: fine\nrun: echo $$ > {pid}\n"
        + "---\nname: main\nrun: sleep 600\n",
    )
    assert status == 4, out
    assert "flaky FAILED after 1 restarts" in out
    *_, flaky, fine, main, _, last = out.splitlines()
    assert [line.split()[2] for line in (flaky, fine, main)] == ["FAILED", "SUCCEEDED", "CANCELLED"]
    assert last == "    its last words"
    assert local.marked() == []


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        ("kill -9 $$", 137, "quiet-0 was killed by SIGKILL (status 137"),
        ("echo Killing helpers; kill -9 $$", 137, "quiet-0 was killed by SIGKILL (status 137"),
        ("exit 3", 3, "quiet-0 ended with status 3 and printed nothing"),
    ],
)
def test_a_reason_that_no_output_gives_comes_last(
    local: "LocalRun", command: str, status: int, reason: str
) -> None:
    found, out, _ = local.run(
        f"{HEADER}---\nname: quiet\nrun: {command}\n---\nname: main\nrun: sleep 600\n"
    )
    assert found == status
    assert f" | {reason}" in out.splitlines()[-1]
    assert "the last 0 lines" not in out


def test_what_a_killed_service_said_is_shown_without_the_requests_that_it_served(
    local: "LocalRun",
) -> None:
    """One line in each form of the access log; a refused request may be why something failed."""
    served = [
        "2026-11-29 10:00:00,000 INFO services.http.tracing [ab12]: POST /grade · code: served "
        "· status: 200 · ms: 3",
        '{"time": "x", "message": "GET /stream/next", "code": "served", "fields": {"ms": "12"}}',
    ]
    told = [
        "2026-11-29 10:00:00,000 WARNING services.reward.app: a worker of the grader has died",
        "2026-11-29 10:00:00,000 INFO services.http.tracing: POST /grade: no prompt · "
        "code: not_served · status: 422 · ms: 1",
    ]
    (local.folder / "said").write_text("".join(f"{line}\n" for line in [*told, *served * 20]))
    # The other node ends the group, which shows what the restarted one had said.
    text = (
        f"{HEADER}---\nname: main\nrun: until [ -e {local.folder}/again ]; do sleep 0.1; done\n"
        "---\nname: reward\nresources: {job_recovery: {max_restarts_on_errors: 1}}\n"
        f"run: |\n  [ -e {local.folder}/killed ] && touch {local.folder}/again && exec sleep 600\n"
        f"  touch {local.folder}/killed\n  cat {local.folder}/said\n  kill -9 $$\n"
    )
    status, _, err = local.run(text, "--follow", "main")
    assert status == 0, err
    assert "reward-0 was killed by SIGKILL" in err
    shown = [line[4:] for line in err.splitlines() if line.startswith("    ")]
    assert shown == told
    assert served[0] in local.log("reward-0")


def test_a_second_runner_touches_nothing_of_the_first(
    local: "LocalRun", make_run: "Callable[[str], LocalRun]"
) -> None:
    """Like running `make demo` twice: it empties its directory first."""
    text = f"{HEADER}---\nname: main\nrun: echo there; sleep 600\n"
    run_dir = local.folder / "run"
    run_dir.mkdir()
    (run_dir / LOCK).touch()  # of an earlier run
    (run_dir / "old").touch()
    first = local.start(text, "--clear", "run")
    local.wait_for(lambda: "there" in local.log("main-0"))
    assert not (run_dir / "old").exists()
    (run_dir / "new").touch()
    for arguments in (["--clear", str(run_dir)], []):
        second = make_run(f"second{len(arguments)}")
        status, _, err = second.run(text, "--log-dir", str(local.logs), *arguments)
        assert status == 2
        assert f"run of jobgroup.local small (process {first.pid} on " in err
    assert (run_dir / "new").exists()
    assert "there" in local.log("main-0")
    first.kill()
    local.finish()
    local.start(text, "--clear", "run")  # a killed run blocks nobody
    local.wait_for(lambda: not (run_dir / "new").exists())


@pytest.mark.parametrize("given", ["mine", "."])
def test_only_the_directory_of_a_run_is_emptied(local: "LocalRun", given: str) -> None:
    """Also with `RUN_DIR` there, whose lock would make the directory look like that of a run."""
    mine = local.folder / given / "thesis.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.touch()
    text = f"{HEADER}---\nname: main\nenvs: {{RUN_DIR: mine}}\nrun: echo there\n"
    for _ in range(2):
        status, _, err = local.run(text, "--clear", given)
        assert status == 2
        assert f"field: --clear · value: {given} · remedy: name the directory of a run" in err
    assert not (mine.parent / LOCK).exists()
    assert mine.exists()


def test_what_a_runner_that_ended_early_leaves_is_no_reason_to_refuse(local: "LocalRun") -> None:
    logs = local.folder / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / LOCK).touch()
    status, _, _ = local.run(f"{HEADER}---\nname: main\nrun: echo there\n", "--clear", "run")
    assert status == 0


def test_without_primary_tasks_all_are_primary(local: "LocalRun") -> None:
    text = "name: small\nexecution: parallel\n---\nname: one\nrun: exit 3\n---\nname: two\nrun: sleep 0.3; echo whole\n"
    status, _, _ = local.run(text)
    assert status == 3
    assert "whole" in local.log("two-0")  # as with SkyPilot, the other primaries run to their end


def test_two_runs_side_by_side_have_addresses_of_their_own(
    make_run: "Callable[[str], LocalRun]",
) -> None:
    server = (
        "python3 -c \"import os,socket,time; s=socket.create_server((os.environ['SKYPILOT_NODE_IPS'], 8000)); "
        "print('listening', s.getsockname()[0], flush=True); time.sleep(600)\""
    )
    text = f"{HEADER}---\nname: main\nrun: |\n  {server}\n"
    runs = [make_run("a"), make_run("b")]
    for run in runs:
        run.start(text)
    for run in runs:
        run.wait_for(lambda run=run: "listening" in run.log("main-0"))  # type: ignore[misc]
    assert runs[0].log("main-0") != runs[1].log("main-0")
    for run in runs:
        assert run.process is not None
        run.process.terminate()
        assert run.finish()[0] == 143


def test_the_merged_stream_has_prefixes_and_no_colours_outside_a_terminal(
    local: "LocalRun",
) -> None:
    _, out, _ = local.run(
        f"{HEADER}---\nname: longer-name\nrun: printf 'a\\rb\\n'; touch $FOLDER/said; sleep 600\n"
        "---\nname: main\nrun: until [ -e $FOLDER/said ]; do sleep 0.02; done; printf 'one\\ntwo\\nno end'\n"
    )
    lines = [line for line in out.splitlines() if line.startswith(("main-0", "longer-name-0"))]
    assert sorted(lines, key=lambda line: line[0]) == [
        "longer-name-0 | b",  # as a terminal would show it
        "main-0        | one",
        "main-0        | two",
        "main-0        | no end",
    ]
    assert "\x1b" not in out
    assert local.log("main-0") == "one\ntwo\nno end"
    assert (local.logs / "longer-name-0.log").read_bytes() == b"a\rb\n"


def test_follow_relays_bytes_as_they_are(local: "LocalRun") -> None:
    _, out, err = local.run(
        HEADER
        + "---\nname: noisy\nrun: echo not on the screen; touch $FOLDER/said; sleep 600\n"
        + "---\nname: main\nrun: until [ -e $FOLDER/said ]; do sleep 0.02; done; "
        + "printf '10%%\\r20%%\\r'; test -t 1 || echo pipe\n",
        *("--follow", "main"),
    )
    assert out == "10%\r20%\rpipe\n"
    assert "not on the screen" in local.log("noisy-0")
    assert "SUCCEEDED" in err


def test_the_lines_of_a_node_that_is_followed_are_shown_once(local: "LocalRun") -> None:
    """Those of another node that is started again are shown, since nobody has seen them."""
    fails = "test -e $FOLDER/NAME && exec sleep 600; touch $FOLDER/NAME; echo words of NAME; exit 3"
    waits = "until [ -e $FOLDER/other ]; do sleep 0.02; done; echo words of main; "
    again = "resources: {job_recovery: {max_restarts_on_errors: 1}}"
    _, out, err = local.run(
        f"{HEADER}---\nname: other\n{again}\nrun: {fails.replace('NAME', 'other')}\n"
        f"---\nname: main\n{again}\n"
        f"run: test -e $FOLDER/main && exit 0; {waits} touch $FOLDER/main; exit 3\n",
        *("--follow", "main"),
    )
    assert out == "words of main\n"
    assert "main-0 ended with status 3" in err
    assert "words of main" not in err
    assert "words of other" in err


def test_a_low_limit_of_open_files_is_raised(local: "LocalRun") -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    local.start(f"{HEADER}---\nname: main\nrun: ulimit -n\n", open_files=1024)
    local.finish()
    assert local.log("main-0").strip() == str(8192 if hard < 0 else min(8192, hard))


def test_setup_is_not_run(local: "LocalRun") -> None:
    text = f"{HEADER}---\nname: main\nsetup: echo preparing; exit 6\nrun: echo ran\n"
    status, out, _ = local.run(text)
    assert status == 0
    assert "setup is not run" in out


def test_secrets_come_from_the_option_or_the_environment(
    local: "LocalRun", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_HERE", "h1")
    monkeypatch.setenv("NAMED", "n1")
    text = f"{HEADER}---\nname: main\nsecrets: {{FROM_HERE: '', GIVEN: '', NAMED: x}}\nrun: echo $FROM_HERE $GIVEN $NAMED\n"
    assert local.run(text, "--secret", "GIVEN=g=1", "--secret", "NAMED")[0] == 0
    assert local.log("main-0") == "h1 g=1 n1\n"


def test_a_port_in_use_is_named_with_the_log_of_the_node(local: "LocalRun") -> None:
    serve = (
        "import os, sys; sys.path.insert(0, os.environ['PYTHONPATH']); from services.http.app import listen; "
        "from common.process.cli import fail; from common.errors import ConfigError\n"
        "    s = listen(os.environ['SKYPILOT_NODE_IPS'], 8000)\n    try: listen(os.environ['SKYPILOT_NODE_IPS'], 8000)\n"
        "    except ConfigError as error: fail(error)"
    )
    text = f'{HEADER}---\nname: main\nrun: |\n    exec "$PYTHON" -c "{serve}"\n'
    status, out, _ = local.run(text, "--env", f"PYTHON={sys.executable}")
    assert status == 2
    assert "Address already in use" in out
    assert "value: 8000" in out
