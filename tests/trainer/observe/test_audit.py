"""What an audit records: groups exactly as the trainer read them, and checksums that see one bit."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common import VERSION
from common.errors import ConfigError
from common.settings.config import load
from common.settings.sections import TrainerSection
from common.wire.schemas import Completion, Group, Turn
from learning.digest import digest
from learning.ranks import Ranks
from tests.support.batches.groups import batch_of, make_group
from tests.support.errors import raises
from trainer.algorithms.batch import Batch
from trainer.audit.comparison import compare_columns, differences
from trainer.audit.history import UNREAD_OF_TRAINER
from trainer.observe.audit import Audit, AuditRecord, Setup
from trainer.observe.group_files import (
    GroupRecorder,
    RecordedGroup,
    read_texts,
    read_trained,
    recorded_steps,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def group(name: str) -> Group:
    """A group with everything that a completion may have."""
    whole = Completion(
        token_ids=ints(5, 6, 7),
        logprobs=floats(-0.5, -1.25, -1e-7),
        text="a\n",
        finish_reason="length",
        weight_versions=[(3, 0, 2), (4, 2, 3)],
        reward=0.1,
        components={"math": 0.1, "format": None},
        kept_tokens=ints(5, 8, 6, 7),
        kept_counts=ints(2, 1, 1),
    )
    masked = Completion(
        token_ids=ints(5, 6, 7, 8),
        logprobs=floats(-0.5, 0, 0, -2),
        text="b",
        finish_reason="stop",
        weight_versions=[(4, 0, 4)],
        reward=-1.0,
        mask=ints(1, 0, 0, 1),
        prompt_ids=ints(1, 2),
        turns=[Turn(0, 1, 0.25), Turn(3, 4)],
    )
    return Group(
        id=name,
        prompt_id="p",
        prompt="What is 1 + 1?",
        ground_truth="2",
        prompt_token_ids=ints(1, 2, 3),
        completions=[whole, masked],
        position=7,
        created_at=1.5,
        min_new_tokens=2,
        barred=ints(9),
    )


def test_groups_are_read_as_the_trainer_had_them(tmp_path: Path) -> None:
    trained = [
        RecordedGroup(
            group("first"),
            advantages=[floats(0.5, 0.25, -1), floats(2, -2)],
            logprobs=[None, floats(-0.75, -3)],
            weight=0.3,
            reused=True,
        ),
        RecordedGroup(
            group("second"),
            advantages=[floats(0, 0, 0), floats(1, 1)],
            logprobs=[floats(-1, -2, -3), floats(-4, -5)],
        ),
    ]
    dropped = group("dropped")
    dropped.completions[0].reward = float("nan")
    recorder = GroupRecorder(tmp_path, 1 << 20, 0, whole=True)
    recorder.step(1, trained, [RecordedGroup(dropped, reason="reward", detail="it failed")])
    recorder.flush()

    found = read_trained(tmp_path, 1)
    assert len(found) == 2
    for was, is_now in zip(trained, found, strict=True):
        assert msgspec.to_builtins(is_now.group, enc_hook=np.ndarray.tolist) == msgspec.to_builtins(
            was.group, enc_hook=np.ndarray.tolist
        )
        assert (is_now.weight, is_now.reused) == (was.weight, was.reused)
        for before, after in zip(was.advantages, is_now.advantages, strict=True):
            assert before.tobytes() == after.tobytes()
        for known, read in zip(was.logprobs, is_now.logprobs, strict=True):
            assert (known is None) == (read is None)
            assert known is None or (read is not None and known.tobytes() == read.tobytes())


def test_a_checksum_sees_a_name_and_one_bit() -> None:
    ranks = Ranks(device_kind="cpu")
    tensor = torch.arange(12.0).reshape(3, 4)
    before = digest([("a", tensor)], ranks)
    assert digest([("a", tensor.T.contiguous().T)], ranks) == before, "of values, not of memory"
    assert digest([("b", tensor)], ranks) != before
    tensor[1, 2] = torch.nextafter(tensor[1, 2], torch.tensor(100.0))
    assert digest([("a", tensor)], ranks) != before


def test_columns_are_compared_by_their_bits_or_within_a_bound() -> None:
    names = ["one", "two", "three"]
    expected = [floats(1, 2), None, floats(0.5)]
    same = compare_columns(
        "advantages", "numbers", expected, [floats(1, 2), floats(9), floats(0.5)], names=names
    )
    assert (same.state, same.detail) == ("equal", "3 numbers")

    near = [floats(1, np.nextafter(np.float32(2), np.float32(3))), None, floats(0.5)]
    other = compare_columns("advantages", "numbers", expected, near, names=names)
    assert (other.state, other.where) == ("differs", "one, trained token 1")
    assert other.expected != other.found
    assert (
        compare_columns("advantages", "numbers", expected, near, names=names, bound=1e-4).state
        == "close"
    )

    lost = [floats(1, np.nan), None, floats(0.5)]
    assert (
        compare_columns("advantages", "numbers", expected, lost, names=names, bound=1.0).state
        == "differs"
    )
    short = [floats(1), None, floats(0.5)]
    assert compare_columns("advantages", "numbers", expected, short, names=names).state == "differs"


def test_what_makes_bits_incomparable_is_said() -> None:
    setup = Setup(
        packages={"torch": "2.13.0"},
        world_size=2,
        threads=1,
        device="cpu",
        instructions="x86_64 AVX512",
    )
    assert differences(setup, setup) == []
    other = msgspec.structs.replace(setup, world_size=1, packages={"torch": "2.14.0"})
    assert differences(setup, other) == [
        "the run had 2 ranks, this has 1",
        "torch was 2.13.0 and is 2.14.0",
    ]


def test_settings_that_an_update_does_not_read_exist() -> None:
    assert set(TrainerSection.model_fields) >= UNREAD_OF_TRAINER


def test_an_audit_needs_the_groups() -> None:
    with raises(ConfigError, field="trainer.audit"):
        load(["--trainer.audit", "true", "--trainer.keep_groups_mb", "0"], {})


def test_the_record_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = load([], {})
    policy: Any = SimpleNamespace(
        config=config, ranks=Ranks(), step=0, total_steps=9, digest=lambda: f"weights {policy.step}"
    )
    critic: Any = SimpleNamespace(resident=lambda: ([], []))
    rng = np.random.default_rng(0)
    batches: dict[int, Batch] = {}
    for number, (run_id, first, last) in enumerate((("one", 0, 3), ("two", 2, 5))):
        audit = Audit(tmp_path, run_id)
        policy.step = first
        audit.begin(policy, "embedded", ("rewards",) if number else ())
        assert AuditRecord(tmp_path).last_step == (3 if number else 0)
        for step in range(first + 1, last + 1):
            groups = [make_group(rng, [1.0, 0.0], position=7 * step + place) for place in (0, 3)]
            batches[step] = batch_of(groups, config)
            policy.step = step
            update: Any = SimpleNamespace(
                norms=(step / 4,), gradients=(f"gradient {step}",), digest_seconds=2.0
            )
            audit.step(policy, critic, batches[step], update)
    record = AuditRecord(tmp_path)
    assert record.last_step == 5
    for step, batch in batches.items():
        line = record.step(step)
        assert line.run_id == ("two" if step > 2 else "one"), "the third was made again"
        assert line.groups == [item.group.id for item in batch.groups]
        assert len(set(line.seeds)) == 2
        assert (line.norms, line.gradients) == ([step / 4], [f"gradient {step}"])
        assert (line.critic, line.values, line.reference_logprobs) == (None, None, None)
        assert (line.total_steps, line.seconds >= 2.0) == (9, True)
        assert line.weights == record.weights_at(step) == f"weights {step}"
        start = record.start(line)
        assert (start.given, start.step) == ((["rewards"], 2) if step > 2 else ([], 0))
        assert start.config == config.model_dump(mode="json")
    packages = start.setup.packages
    assert packages["torch"] == metadata.version("torch")
    assert packages["rlhf-math"] == VERSION
    assert (record.weights_at(0), record.weights_at(6)) == ("weights 0", None)
    errors: list[Callable[[], object]] = [
        lambda: record.step(6),
        lambda: record.start(msgspec.structs.replace(line, run_id="three")),
        lambda: AuditRecord(tmp_path / "none"),
    ]
    for wrong in errors:
        with pytest.raises(ConfigError):
            wrong()


def test_the_groups_of_the_newest_steps_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes: dict[int, int] = {}
    for keep in (1 << 20, 0):
        # The second attempt continues, with room for two and a half steps.
        keep_bytes = keep or round(2.5 * max(sizes.values()))
        recorder = GroupRecorder(tmp_path, keep_bytes, 0 if keep else 4, whole=True)
        for step in range(1, 5) if keep else range(5, 8):
            groups = [make_group(rng, [1.0, 0.0] * 4, position=step) for _ in range(3)]
            recorder.step(step, [RecordedGroup(each) for each in groups], [])
            recorder.flush()
            kept = recorded_steps(tmp_path)
            sizes[step] = kept[step].stat().st_size
            assert sorted(kept) == list(range(1, step + 1))[-(4 if keep else 2) :]
            texts = read_texts(tmp_path, step)
            assert [each.id for each in texts] == [each.id for each in groups]
            assert [each.prompt_tokens for each in texts] == [
                each.prompt_token_ids.tolist() for each in groups
            ]
    assert read_texts(tmp_path, 1) == []
