"""What `rlhf audit` does for its words, in this process: the stages that it runs, what it prints,
its exit status, its ranks and its certificates.
"""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.weights.checksums import checksum
from tests.support.errors import raises
from trainer.audit import __main__ as command
from trainer.audit import certify, reexecution
from trainer.audit import tinker as of_tinker
from trainer.audit.certify import Certificate, drawn_steps
from trainer.audit.comparison import STAGES, StageOutcome
from trainer.tinker.settings import RECORDED

_STATES = st.sampled_from(["equal", "close", "differs", "not compared"])
OUTCOMES = st.lists(
    st.builds(
        StageOutcome,
        stage=st.sampled_from(STAGES),
        state=_STATES,
        detail=st.just("what was compared"),
        where=st.sampled_from(["", "row 3"]),
        expected=st.just("1"),
        found=st.just("2"),
    ),
    max_size=4,
)


class Recorded:
    """Stands for the re-execution of a step of a run of so many ranks, on one of them."""

    made: list[dict[str, Any]]
    world_size = 1
    rank = 0
    outcomes: list[StageOutcome]
    barriers = 0

    def __init__(
        self, run_dir: Path, step: int, stages: list[str], tell: Any, recorded_tools: bool
    ) -> None:
        self.run_dir = run_dir
        self.step = step
        self.made.append({"stages": stages, "recorded_tools": recorded_tools})
        setup = SimpleNamespace(
            world_size=self.world_size, threads=3, device="cpu", packages={"torch": "2.0"}
        )
        self.recorded = SimpleNamespace(start=SimpleNamespace(setup=setup, run_id="first"))
        self._tell = tell

    def ranks(self) -> Any:
        def barrier() -> None:
            Recorded.barriers += 1

        return nullcontext(SimpleNamespace(is_rank_zero=self.rank == 0, barrier=barrier))

    def run(self, rank: Any) -> list[StageOutcome]:
        for outcome in self.outcomes:
            self._tell(outcome)
        return self.outcomes


@contextmanager
def audited(outcomes: list[StageOutcome], world_size: int = 1, rank: int = 0) -> Any:
    """Inside this context a step comes out so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reexecution, "StepReexecution", Recorded)
        patch.setattr(command, "check_run", lambda run_dir: None)
        patch.setattr(command, "audited_steps", lambda run_dir: {1, 7})
        threads: list[int] = []
        patch.setattr(torch, "set_num_threads", threads.append)
        patch.setattr(Recorded, "made", [], raising=False)
        patch.setattr(Recorded, "outcomes", outcomes, raising=False)
        patch.setattr(Recorded, "world_size", world_size)
        patch.setattr(Recorded, "rank", rank)
        patch.setattr(Recorded, "barriers", 0)
        # The command's own thread that tells how long it takes.
        patch.setattr(command, "waits_told", nullcontext)
        patch.delenv("RLHF_AUDIT_RANK", raising=False)
        yield SimpleNamespace(patch=patch, threads=threads)


def status_of(*words: object) -> object:
    with pytest.raises(SystemExit) as ended:
        command.main(list(map(str, words)))
    return ended.value.code


def test_the_outcomes_of_a_step_are_printed_and_the_first_that_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @given(OUTCOMES, st.booleans())
    def check(outcomes: list[StageOutcome], recorded_tools: bool) -> None:
        path = tmp_path / "outcomes.json"
        words: list[object] = [tmp_path, "--step", 7, "--json", path]
        words += ["--recorded-tools"] if recorded_tools else []
        with audited(outcomes) as told:
            status = status_of(*words)
        assert told.threads == [3]
        differing = [outcome.stage for outcome in outcomes if outcome.state == "differs"]
        assert status == int(bool(differing))
        assert msgspec.json.decode(path.read_bytes(), type=list[StageOutcome]) == outcomes

        lines = [f"step 7 of {tmp_path}, made by first on 1 rank (cpu, torch 2.0)"]
        for each in outcomes:
            lines.append(f"{each.stage:<12} {each.state:<13} {each.detail}")
            if each.where:
                indent = " " * 12
                lines.append(f"{indent} at            row 3")
                lines.append(f"{indent} expected      1")
                lines.append(f"{indent} found         2")
        left_out = [each.stage for each in outcomes if each.state == "not compared"]
        if differing:
            lines.append(f"the first stage that differs: {differing[0]}")
        elif left_out:
            names = ", ".join(left_out)
            lines.append(
                "nothing differs from what the run recorded, except what was not compared "
                f"({names})"
            )
        else:
            lines.append("nothing differs from what the run recorded")
        assert capsys.readouterr().out.splitlines() == lines

    check()


def test_the_stages_are_those_of_the_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with audited([]):
        assert status_of(tmp_path, "--step", 1) == 0
        assert status_of(tmp_path, "--step", 1, "--stages", "new-weights", "prompts") == 0
        assert status_of(tmp_path, "--step", 1, "--stages", "checkpoint", "--recorded-tools") == 0
        assert Recorded.made == [
            {"stages": [each for each in STAGES if each != "checkpoint"], "recorded_tools": False},
            {"stages": ["prompts", "new weights"], "recorded_tools": False},
            {"stages": ["checkpoint"], "recorded_tools": True},
        ]
    capsys.readouterr()


def test_a_run_of_several_ranks_has_as_many_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    different = [StageOutcome("prompts", "differs", "")]
    asked: list[Any] = []

    def ranks_of(*given: Any) -> int:
        asked.append(given)
        return 5

    with audited(different, world_size=2) as told:
        told.patch.setattr(command, "_run_ranks", ranks_of)
        assert status_of(tmp_path, "--step", 1) == 5
        assert asked == [(2, 3, [str(tmp_path), "--step", "1"])]
        assert "made by first on 2 ranks (cpu, torch 2.0)" in capsys.readouterr().out
        assert not told.threads, "the ranks compute"

        told.patch.setenv("RLHF_AUDIT_RANK", "1")
        path = tmp_path / "outcomes.json"
        assert status_of(tmp_path, "--step", 1, "--json", path) == 1
        assert path.exists()
        path.unlink()
        told.patch.setattr(Recorded, "rank", 1)
        assert status_of(tmp_path, "--step", 1, "--json", path) == 0
        assert not path.exists(), "rank 0 alone tells"
        assert "made by" not in capsys.readouterr().out
        assert (len(asked), told.threads, Recorded.barriers) == (1, [3, 3], 2)


def test_other_questions_need_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def certified(*given: object, output: Path, more: list[str]) -> int:
        asked.append((*given, output, more))
        return 3

    def checked(*given: object) -> int:
        asked.append(given)
        return 4

    monkeypatch.setattr(command, "check_run", asked.append)
    monkeypatch.setattr(command, "audited_steps", lambda run_dir: {1})
    monkeypatch.setattr(certify, "certify", certified)
    monkeypatch.setattr(certify, "check_certificate", checked)
    run_dir = tmp_path / "run"
    path = tmp_path / "file"
    assert status_of(run_dir, "--certify", path, "--seed", "mine") == 3
    assert status_of(run_dir, "--certify", path, "--seed", "a", "--count", 9) == 3
    assert status_of(run_dir, "--certify", path, "--seed", "a", "--recorded-tools") == 3
    assert status_of(run_dir, "--check", path) == 4
    assert asked == [
        run_dir,
        (run_dir, "mine", 3, path, []),
        run_dir,
        (run_dir, "a", 9, path, []),
        run_dir,
        (run_dir, "a", 3, path, ["--recorded-tools"]),
        (path, run_dir),
    ]


def test_a_tinker_server_is_audited_on_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = SimpleNamespace(world_size=1, threads=3)
    monkeypatch.delenv("RLHF_AUDIT_RANK", raising=False)
    monkeypatch.setattr(command, "waits_told", nullcontext)
    monkeypatch.setattr(of_tinker, "audit_tinker", lambda directory: 6)
    monkeypatch.setattr(
        of_tinker, "recorded_settings", lambda directory: SimpleNamespace(setup=setup)
    )
    monkeypatch.setattr(command, "_run_ranks", lambda *given: given)
    (tmp_path / RECORDED).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / RECORDED).touch()
    assert status_of(tmp_path) == 6
    setup.world_size = 2
    assert status_of(tmp_path) == (2, 3, [str(tmp_path)])
    monkeypatch.setenv("RLHF_AUDIT_RANK", "1")
    assert status_of(tmp_path) == 6


@given(
    st.lists(
        st.lists(st.sampled_from([None, None, 0, 1, -9]), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_the_status_of_ranks_is_that_of_the_first_that_fails(
    polls: list[list[int | None]],
) -> None:
    """`polls` has what each rank says at every look; a rank that has ended stays so."""
    ranks: list[Any] = []
    looks = 0

    class Rank:
        def __init__(self, words: list[str], env: dict[str, str]) -> None:
            assert words == [sys.executable, "-m", "trainer.audit", "run", "--step", "1"]
            self.number = len(ranks)
            self.killed = self.waited = False
            ranks.append(self)
            number = str(self.number)
            expected = {
                "RLHF_AUDIT_RANK": "1",
                "WORLD_SIZE": str(len(polls)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "4321",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "3",
                "RANK": number,
                "LOCAL_RANK": number,
                "KEPT": "yes",
            }
            assert env == expected

        def poll(self) -> int | None:
            return status(self.number, looks)

        def kill(self) -> None:
            self.killed = True

        def wait(self) -> None:
            assert self.killed
            self.waited = True

    def status(rank: int, look: int) -> int | None:
        ended = [each for each in polls[rank][: look + 1] if each is not None]
        if ended:
            return ended[0]
        return 0 if look >= len(polls[rank]) else None

    def slept(seconds: float) -> None:
        nonlocal looks
        looks += 1

    def store(host: str, port: int, count: int, **options: bool) -> Any:
        assert (host, port, count) == ("127.0.0.1", 0, len(polls))
        assert options == {"is_master": True, "wait_for_workers": False}
        return SimpleNamespace(port=4321)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "TCPStore", store)
        patch.setattr(subprocess, "Popen", Rank)
        patch.setattr(time, "sleep", slept)
        patch.setattr(os, "environ", {"KEPT": "yes", "RANK": "another"})
        found = command._run_ranks(len(polls), 3, ["run", "--step", "1"])
    assert [(rank.killed, rank.waited) for rank in ranks] == [(True, True)] * len(polls)
    for look in range(looks + 1):
        statuses = [status(rank, look) for rank in range(len(polls))]
        failed = [each for each in statuses if each]
        if look < looks:
            assert not failed
            assert None in statuses
        else:
            assert found == (failed[0] if failed else 0)
            assert failed or None not in statuses


@pytest.mark.parametrize("seed", range(20))
def test_a_certificate_has_what_came_out(
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(seed)
    last = draw.randint(1, 6)
    count = draw.randint(1, 4)
    run_dir = tmp_path / "run"
    published = run_dir / "checkpoints" / f"step_{last:06d}"
    published.mkdir(parents=True)
    for name in ("b.safetensors", "a.safetensors", "config.json", "optimizer.pt"):
        (published / name).write_text(name)
    (run_dir / "audit.jsonl").write_text("the record")
    states = draw.choices(["equal", "close", "differs", "not compared"], [8, 2, 1, 2], k=9)
    executed: list[list[str]] = []
    outcomes: list[list[StageOutcome]] = []

    def run(words: list[str], check: bool) -> None:
        assert words[:4] == [sys.executable, "-m", "trainer.audit", str(run_dir)]
        assert not check, "its status says no more than the outcomes"
        step, written, *more = words[5], words[7], *words[8:]
        assert (words[4], words[6]) == ("--step", "--json")
        executed.append([step, *more])
        found = [StageOutcome("rewards", states[len(executed)], "answers")]  # type: ignore[arg-type]
        outcomes.append(found)
        Path(written).write_bytes(msgspec.json.encode(found))

    monkeypatch.setattr(
        "trainer.observe.audit.AuditRecord", lambda given: SimpleNamespace(last_step=last)
    )
    monkeypatch.setattr("trainer.policy.checkpoint.newest", lambda folder: published)
    monkeypatch.setattr(subprocess, "run", run)
    output = tmp_path / "certificate.json"
    status = certify.certify(run_dir, "mine", count, output=output, more=["--recorded-tools"])

    steps = drawn_steps("mine", count, last)
    drawn = [[str(step), "--recorded-tools"] for step in steps]
    assert executed == [*drawn, [str(last), "--stages", "checkpoint"]]
    made = msgspec.json.decode(output.read_bytes(), type=Certificate)
    names = ("a.safetensors", "b.safetensors", "config.json")
    assert made == Certificate(
        seed="mine",
        steps=last,
        drawn=[
            certify.ExecutedStep(step, found) for step, found in zip(steps, outcomes, strict=False)
        ],
        checkpoint=certify.ExecutedStep(last, outcomes[-1]),
        record=checksum(run_dir / "audit.jsonl"),
        published={name: checksum(published / name) for name in names},
    )
    wrong = [
        f"step {step}, rewards differs: answers"
        for step, (found,) in zip([*steps, last], outcomes, strict=True)
        if found.state == "differs"
    ]
    assert list(made.problems()) == wrong
    assert status == int(bool(wrong))
    *first, end = capsys.readouterr().out.splitlines()
    last_problem, _, rest = end.partition("; ")
    assert [*first, last_problem] == (wrong or ["nothing differs"])
    assert rest == f"steps {steps} of {last}, checkpoint {published.name}: {output}"

    # The certificate is checked against the weights of the checkpoint.
    assert certify.check_certificate(output, published) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"the steps {steps} of {last} were drawn by 'mine'"
    left_out = [
        f"not compared: step {step}, rewards: answers"
        for step, (found,) in zip(steps, outcomes, strict=False)
        if found.state == "not compared"
    ]
    held = [f"does not hold: {problem}" for problem in wrong]
    assert printed[1:] == left_out + (held or ["the certificate holds for these weights"])
    (published / "a.safetensors").write_text("other")
    assert certify.check_certificate(output, published) == 1
    assert "does not hold: a.safetensors has the checksum" in capsys.readouterr().out


def test_what_cannot_be_executed_has_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.observe.audit.AuditRecord", lambda given: SimpleNamespace(last_step=2)
    )
    monkeypatch.setattr("trainer.policy.checkpoint.newest", lambda folder: None)
    output = tmp_path / "file"
    with raises(ConfigError, field="trainer.run_dir"):
        certify.certify(tmp_path, "a", 1, output=output, more=[])
    monkeypatch.setattr("trainer.policy.checkpoint.newest", lambda folder: tmp_path / "step_000002")
    monkeypatch.setattr(subprocess, "run", lambda words, check: None)
    with raises(ConfigError, field="RUN_DIR", value=str(tmp_path)):
        certify.certify(tmp_path, "a", 1, output=output, more=[])
    assert not output.exists()
    with raises(ConfigError, field="WEIGHTS", value=str(tmp_path)):
        certify.weight_files(tmp_path)
    stage = {"stage": "rewards", "state": "equal", "detail": ""}
    content = {"seed": "a", "steps": 2, "drawn": [], "record": "", "published": {}}
    content["checkpoint"] = {"step": 2, "stages": [stage]}
    output.write_text(json.dumps(content))
    made = msgspec.json.decode(output.read_bytes(), type=Certificate)
    (problem,) = made.problems()
    assert problem == f"its steps are [], but the seed draws {drawn_steps('a', 1, 2)}"
