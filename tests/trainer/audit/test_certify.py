"""A certificate holds for the weights that it names and for the steps that the seed draws."""

import json
import random
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.runs.audits import audited, command
from tests.support.runs.in_process import quiet
from trainer.audit.certify import check_certificate, drawn_steps, weight_files
from trainer.start.in_process import train_in_process


def test_the_seed_alone_draws_the_steps() -> None:
    assert drawn_steps("a", 3, 100) == drawn_steps("a", 3, 100)
    assert drawn_steps("a", 3, 100) != drawn_steps("b", 3, 100)
    assert drawn_steps("a", 9, 4) == [1, 2, 3, 4]
    counts = [0] * 10
    for seed in range(300):
        for step in drawn_steps(str(seed), 2, 10):
            counts[step - 1] += 1
    assert min(counts) > 30, "every step can be drawn"


def certificate(path: Path, weights: Path, state: str = "equal", **changes: object) -> Path:
    """Writes a certificate of two steps of ten for the weights in a directory."""
    stage = {"stage": "rewards", "state": state, "detail": "8 answers"}
    content = {
        "seed": "a",
        "steps": 10,
        "drawn": [{"step": step, "stages": [stage]} for step in drawn_steps("a", 2, 10)],
        "checkpoint": {"step": 10, "stages": [stage]},
        "record": "",
        "published": weight_files(weights),
    }
    path.write_text(json.dumps(content | changes))
    return path


def test_what_a_certificate_does_not_show_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"some weights")
    path = tmp_path / "certificate.json"
    assert check_certificate(certificate(path, weights), weights) == 0
    assert "the certificate holds" in capsys.readouterr().out

    assert check_certificate(certificate(path, weights, seed="b"), weights) == 1
    assert "the seed draws" in capsys.readouterr().out
    assert check_certificate(certificate(path, weights, state="differs"), weights) == 1
    assert check_certificate(certificate(path, weights, state="not compared"), weights) == 0
    assert "not compared: step" in capsys.readouterr().out
    nothing: list[object] = []
    assert check_certificate(certificate(path, weights, drawn=nothing), weights) == 1
    lost = {"step": 10, "stages": nothing}
    assert check_certificate(certificate(path, weights, checkpoint=lost), weights) == 1

    certificate(path, weights)
    (weights / "model.safetensors").write_bytes(b"other weights")
    assert check_certificate(path, weights) == 1
    assert "model.safetensors has the checksum" in capsys.readouterr().out

    (weights / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        check_certificate(path, weights)
    path.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check_certificate(path, weights)
    assert caught.value.field == "--check"


@pytest.mark.parametrize("seed", range(30))
def test_a_certificate_is_of_these_files_and_no_others(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    weights = tmp_path / "weights"
    weights.mkdir()
    names = ["a.safetensors", "b.safetensors", "config.json", "tokenizer.json"]
    contents = {name: name for name in names}
    for name in names:
        (weights / name).write_text(name)
    path = certificate(tmp_path / "certificate.json", weights)
    for _ in range(draw.randint(0, 2)):
        name = draw.choice([*names, "c.safetensors"])
        deed = draw.choice(["change", "remove"])
        if deed == "remove" and name != "a.safetensors":
            (weights / name).unlink(missing_ok=True)
            contents.pop(name, None)
        else:
            contents[name] = draw.choice([name, "other"])
            (weights / name).write_text(contents[name])
    # Of a tokenizer a certificate says nothing.
    of_model = {name: content for name, content in contents.items() if name != "tokenizer.json"}
    expected = {name: name for name in names[:3]}
    wrong = {name for name in of_model | expected if of_model.get(name) != expected.get(name)}
    assert check_certificate(path, weights) == int(bool(wrong))
    printed = capsys.readouterr().out
    named = {line.split()[3] for line in printed.splitlines() if "has the checksum" in line}
    assert named == wrong


@pytest.mark.integration
@pytest.mark.slow
def test_drawn_steps_are_executed_again_and_the_weights_are_those_published(
    base_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train_in_process(audited(base_model, run_dir), quiet())
    path = tmp_path / "certificate.json"
    words = [str(run_dir), "--certify", str(path), "--seed", "mine", "--count", "1"]
    status, printed = command(*words)
    assert status == 0, printed
    content = json.loads(path.read_text())
    stages = [stage for each in content["drawn"] for stage in each["stages"]]
    assert {stage["state"] for stage in stages} <= {"equal", "close"}
    (checkpoint,) = content["checkpoint"]["stages"]
    assert (checkpoint["stage"], checkpoint["state"]) == ("checkpoint", "equal")
    published = str(run_dir / "checkpoints/step_000004")
    status, printed = command(published, "--check", str(path))
    assert status == 0, printed
    assert "the certificate holds for these weights" in printed
