"""Typical mistakes in all programs: status 2, and field, value and remedy in the program's own
terms."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.process.cli import run
from common.process.topology import cuda_of_driver
from common.settings.config import load
from jobgroup.doctor import __main__ as doctor
from jobgroup.local import __main__ as local
from rlhf_math.commands import COMMANDS
from tests.support.paths import ROOT
from trainer import TrainerConfig
from trainer.audit import __main__ as replay
from trainer.cli import (
    compare,
    diagnose,
    evaluate_model,
    export,
    report,
    tiny_model,
    train_math,
)
from trainer.dashboard import __main__ as dashboard
from trainer.what_if import fork, regrade

GROUP = "jobgroup/rlhf-math-jobgroup.yaml"
RECORD = '{"kind": "start", "step": 0}\n{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n'
PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "train_math": train_math.main,
    "evaluate_model": evaluate_model.main,
    "export": export.main,
    "report": report.main,
    "compare": compare.main,
    "diagnose": diagnose.main,
    "replay": replay.main,
    "regrade": regrade.main,
    "fork": fork.main,
    "tiny_model": tiny_model.main,
    "dashboard": dashboard.main,
    "local": local.main,
    "doctor": doctor.main,
    "trainer": lambda words: load(words, {}),
    "services.data": lambda words: load(words, {}),
    "services.reward": lambda words: load(words, {}),
    "services.rollout": lambda words: load(words, {}),
    "services.replay": lambda words: load(words, {}),
    "environment": lambda words: load([], dict(word.split("=", 1) for word in words)),
    "services.engine": lambda words: importlib.import_module("services.engine.__main__").parse(
        words
    ),
}
MISTAKES = [
    (
        "train_math",
        "--dataset FOLDER/latin1.csv --model BASE",
        "--dataset|latin1.csv is not in UTF-8: byte 19 is 0xe9|save the file in UTF-8",
    ),
    (
        "train_math",
        "--dataset tiny --num-samples 3 --model BASE",
        "--gradient-accumulation-steps|3 problems|lower it or per_device_train_batch_size",
    ),
    (
        "train_math",
        "--dataset tiny --model FOLDER/weightless",
        "--model|the directory has no weights|copy them there",
    ),
    (
        "train_math",
        "--dataset tiny --model FOLDER/mute",
        "--model|the model has no tokenizer|copy its files there",
    ),
    (
        "local",
        f"{GROUP} --env MODEL_NAME=FOLDER/mute",
        "model.name|the model has no tokenizer|copy its files there",
    ),
    (
        "train_math",
        "--dataset tiny --model FOLDER/bert",
        "--model|not a causal language model but a BertForMaskedLM|writes text from left to right",
    ),
    (
        "evaluate_model",
        "--dataset tiny --model FOLDER/run",
        "--model|this is the directory of a run, not of a model|checkpoints/step_000004",
    ),
    (
        "train_math",
        "--dataset tiny --set reward.functions=math",
        "--set reward.functions|does not apply|leave it out",
    ),
    (
        "evaluate_model",
        "--dataset tiny --model FOLDER/adapter",
        "--model|an adapter of the model /srv/gone, which is not there|restore that model",
    ),
    (
        "evaluate_model",
        "--dataset tiny --model htp://host/v1",
        "--model|this is not the address of a server|http://HOST:PORT/v1",
    ),
    (
        "evaluate_model",
        "--dataset tiny --model http://127.0.0.1:1/v1",
        "--model|the server cannot be reached|check that it is running",
    ),
    ("local", f"{GROUP} --env API_TOKEN=secret", "API_TOKEN|6 characters|openssl rand -hex 32"),
    (
        "local",
        f"{GROUP} --env RLHF_ALGORITHM__NAME=grppo",
        "algorithm.name|grppo|did you mean grpo?",
    ),
    (
        "local",
        f"{GROUP} --env MODEL_NAME=FOLDER/none",
        "model.name|there is no such directory|name a local model directory",
    ),
    (
        "local",
        f"{GROUP} --env RLHF_REWARD__FUNCTIONS=my_rewards:Brief --env MODEL_NAME=BASE",
        "reward.functions|there is no module my_rewards|add its directory to PYTHONPATH",
    ),
    (
        "train_math",
        "--dataset FOLDER/rows.jsonl --model BASE",
        "--dataset|there is no column|data.prompt_field is --set data.prompt_field=VALUE here",
    ),
    (
        "train_math",
        "--model FOLDER --dataset tiny",
        "--model|config.json is not JSON|restore that file",
    ),
    (
        "evaluate_model",
        "--dataset FOLDER/rows.jsonl --model BASE",
        "--dataset|there are foo|data.prompt_field is --set data.prompt_field=VALUE here",
    ),
    (
        "evaluate_model",
        "--dataset no/where --model BASE",
        "--dataset|use a copy in files|data.source PATH",
    ),
    (
        "evaluate_model",
        "--dataset tiny --model BASE --set trainer.seed=3",
        "--set trainer.seed|an evaluation does not read this setting",
    ),
    ("trainer", "--config FOLDER/broken.yaml", "--config|line 2: expected the node content"),
    (
        "local",
        "FOLDER/broken.yaml",
        "YAML|line 2: expected the node content|name the YAML of a job group",
    ),
    ("trainer", "--config FOLDER/twice.yaml", "--config|line 2: the key trainer stands twice"),
    ("local", "FOLDER/twice.yaml", "YAML|line 2: the key trainer stands twice in one mapping"),
    ("trainer", '--reward.functions [{"name":"math","name":"code"}]', "the key name stands twice"),
    (
        "train_math",
        "--dataset FOLDER/twice.jsonl --model BASE",
        "twice.jsonl, line 1: the key 'answer' stands twice in one object|repair the file",
    ),
    (
        "train_math",
        "--dataset FOLDER/semicolons.csv --model BASE",
        "--dataset|separates its columns by ';': 'question;answer' is one column|save it with",
    ),
    ("local", "FOLDER/text.yaml", "YAML|text.yaml|every document of a job group must be a mapping"),
    (
        "local",
        f"{GROUP} --log-dir FOLDER/logs --clear README.md",
        "--clear|README.md|name another directory",
    ),
    ("dashboard", "FOLDER --host 999.1.1.1", "host|999.1.1.1|an address of this machine"),
    ("train_math", "--modl x", "--modl|x|did you mean --model?"),
    ("train_math", "--model", "--model|write --model VALUE"),
    ("train_math", "--model ./nothing --dataset tiny", "--model|./nothing|local model directory"),
    ("train_math", "--model README.md --dataset tiny", "--model|README.md|this is a file"),
    ("train_math", "--model docs --dataset tiny", "--model|docs|no config.json"),
    ("train_math", "--model not/there --dataset tiny", "--model|not/there|hub|HF_HUB_OFFLINE"),
    ("train_math", "--trainer gropo", "--trainer|gropo|did you mean grpo?"),
    (
        "train_math",
        "--num-generations 1",
        "sampling.group_size is num_generations here|raise|trainer_type is --trainer",
    ),
    ("train_math", "--num-generations four", "--num-generations|four|give a whole number"),
    ("train_math", "--learning-rate -1", "--learning-rate|-1|greater than 0"),
    ("train_math", "--learning-rate -1e-4", "--learning-rate|-0.0001|greater than 0"),
    ("train_math", "--help-all", "--help-all|did you mean --help?"),
    (
        "train_math",
        "--set algorithm.entropi=1",
        "did you mean algorithm.entropy_coef? `python -m trainer --help-all` lists every one",
    ),
    (
        "train_math",
        "--dataset FOLDER/cut.jsonl --model BASE",
        "error: cut.jsonl, line 1 is not JSON: Expecting ',' delimiter (column 11)|repair the file",
    ),
    ("train_math", "--learning-rate fast", "--learning-rate|fast|give a number"),
    ("train_math", "--temperature 0", "--temperature|0|greater than 0"),
    ("train_math", "--num-generations 5", "--per-device-train-batch-size|num_generations"),
    ("train_math", "--bf16", "--bf16|True|set use_gpu"),
    ("train_math", "--report-to wandbb", "--report-to|wandbb|did you mean wandb?"),
    (
        "train_math",
        "--model .cache/tiny-base --dataset gsm9k",
        "--dataset|gsm9k|the path of a file or a directory",
    ),
    ("train_math", "--model .cache/tiny-base --dataset nothing.jsonl", "--dataset|nothing.jsonl"),
    ("train_math", "--num-samples 0", "--num-samples|'0'|above 0"),
    ("train_math", "--eval-samples -5", "--eval-samples|'-5'|above 0"),
    (
        "train_math",
        "--set algorithm.entropy=0.1",
        "--set algorithm.entropy|0.1|algorithm.entropy_coef",
    ),
    (
        "train_math",
        "--set algorithm.entropy_coef=high",
        "--set algorithm.entropy_coef|high|a valid number",
    ),
    ("train_math", "--set seed", "--set|'seed'|write it like"),
    (
        "train_math",
        "--model .cache/tiny-base --set data.levels=hard --dataset math",
        "--set data.levels|hard|write levels",
    ),
    ("train_math", "--set data.levels=4", "--set data.levels|gsm8k|leave it out"),
    ("train_math", "--resume", "--resume|--output-dir"),
    ("train_math", "--resume auto --dataset tiny --model BASE", "--resume|auto|--output-dir"),
    ("train_math", "--resume allways --dataset tiny", "--resume|allways|auto"),
    (
        "train_math",
        "--resume --output-dir FOLDER/empty --dataset tiny --model BASE",
        "--resume|FOLDER/empty|there is no run to continue|leave it out to begin a run",
    ),
    (
        "train_math",
        "--output-dir FOLDER --dataset tiny --model BASE",
        "--output-dir|continue it|resume_from_checkpoint is --resume here",
    ),
    (
        "train_math",
        "--output-dir /proc/x --dataset tiny",
        "--output-dir|/proc/x|name another directory",
    ),
    (
        "train_math",
        "--save-to README.md --dataset tiny",
        "--save-to|README.md|a file has this name|name another directory",
    ),
    (
        "train_math",
        "--critic-learning-rate 1e-5",
        "--critic-learning-rate|1e-05|trainer_type is --trainer here",
    ),
    ("evaluate_model", "", "--model|add it"),
    ("evaluate_model", "--model ./nothing", "--model|./nothing|local model directory"),
    ("evaluate_model", "--model .cache/tiny-base --compare ./other", "--compare|./other"),
    ("evaluate_model", "--model x --k 0", "--k|'0'|above 0"),
    ("evaluate_model", "--model x --temperature 0", "--temperature|0.0|greater than 0"),
    ("evaluate_model", "--model x --output-file /proc/r.json", "--output-file|/proc|name a"),
    (
        "evaluate_model",
        "--model .cache/tiny-base --api-key-env KEY",
        "--api-key-env|KEY|leave it out",
    ),
    (
        "evaluate_model",
        "--model .cache/tiny-base --dataset tiny --split tst",
        "--dataset|'tst'|train and test",
    ),
    ("export", "docs/nothing out", "CHECKPOINT|docs/nothing"),
    ("export", "docs /tmp/out-of-docs", "CHECKPOINT|docs|no config.json"),
    ("export", "docs out --dtype float8", "--dtype|float8|use float32"),
    ("report", "runs/nothing", "RUN_DIR|runs/nothing"),
    ("report", "docs", "RUN_DIR|docs|runs/"),
    ("dashboard", "docs", "RUN_DIR|docs|runs/"),
    *(
        (program, f"{path}{words}", f"RUN_DIR|{path}|{told}|name the directory of a run")
        for program, words in (
            ("report", ""),
            ("compare", ""),
            ("dashboard", ""),
            ("diagnose", ""),
            ("replay", " --step 1"),
        )
        for path, told in (
            ("FOLDER/absent", "there is no such run directory"),
            ("FOLDER/bert", "this is not a run directory"),
            ("FOLDER/broken.yaml", "this is not a run directory"),
        )
    ),
    *(
        (program, f"FOLDER/run{words}", "RUN_DIR|FOLDER/run|no step is recorded here yet|wait for")
        for program, words in (("report", ""), ("compare", ""), ("replay", " --step 1"))
    ),
    (
        "replay",
        "FOLDER/ended",
        "trainer.audit|this run has no audit record|made with trainer.audit true",
    ),
    ("replay", "FOLDER/ended --step 1", "this run has no audit record"),
    (
        "replay",
        "FOLDER/audited",
        "--step|no step is named|name a recorded step: 1 to 2",
    ),
    ("replay", "FOLDER/audited --step 9", "--step|9|the audit record lacks step 9|1 to 2"),
    (
        "fork",
        "FOLDER/ended --step 3",
        "--step|no checkpoint of this step|of a checkpoint (step_000002, step_000004)",
    ),
    (
        "fork",
        "FOLDER/ended --step 2 --set optimizer.learning_rat=1",
        "--set optimizer.learning_rat|1|did you mean optimizer.learning_rate?",
    ),
    (
        "fork",
        "FOLDER/ended --step 2 --set optimizer.learning_rate=-1",
        "--set optimizer.learning_rate|-1|greater than 0",
    ),
    ("fork", "FOLDER/ended --step 4 --set trainer.max_steps=4", "trainer.max_steps|4|above 4"),
    *(
        (
            program,
            f"{words} {path}",
            f"{words.split()[-1]}|{path}|{told}|name a file in an existing",
        )
        for program, words in (
            ("evaluate_model", "--model x --output-file"),
            ("report", "FOLDER/ended --output"),
            ("replay", "FOLDER/audited --step 1 --json"),
            ("replay", "FOLDER/audited --seed a --certify"),
        )
        for path, told in (
            ("FOLDER", "this is a directory"),
            ("/no/r.json", "there is no such directory"),
        )
    ),
    *(
        (program, f"{words}=", f"{words.split()[-1]}|it is empty|name a path")
        for program, words in (
            ("train_math", "--output-dir"),
            ("train_math", "--save-to"),
            ("fork", "FOLDER/ended --step 2 --output"),
            ("report", "FOLDER/ended --output"),
            ("regrade", "FOLDER/ended --gold"),
            ("local", f"{GROUP} --log-dir"),
            ("local", f"{GROUP} --clear"),
        )
    ),
    ("trainer", "--trainer.run_dir=", "trainer.run_dir|it is empty|name a path"),
    ("trainer", "--state_dir=", "state_dir|it is empty|name a path"),
    *(
        ("train_math", f"{given} 1", f"{given}|there is no such argument|{remedy}")
        for given, remedy in (
            ("--beta", "use --kl-coef"),
            ("--num_generations", "use --num-generations"),
            ("--max-completion-length", "use --max-new-tokens"),
            ("--rloo_k", "use --num-generations"),
            ("--model_name_or_path", "use --model"),
            ("--delta", "use --set algorithm.dual_clip=VALUE"),
            ("--reward_weights", "only the Python API has it"),
            ("--fp16", "leave it out: "),
            ("--sync_ref_model", "set algorithm.reference_refresh"),
        )
    ),
    ("local", f"{GROUP} --num-nodes data-server=2", "--num-nodes|data-server=2|leave it at 1"),
    ("local", f"{GROUP} --num-nodes replay-buffer=3", "--num-nodes|replay-buffer=3|at 1"),
    ("dashboard", "runs/x --port 99999", "--port|99999|65535"),
    ("tiny_model", "docs", "DIRECTORY|docs|name another"),
    ("local", "jobgroup/nothing.yaml", "YAML|jobgroup/nothing.yaml|rlhf-math-jobgroup.yaml"),
    ("local", f"{GROUP} --env MAX_STEP=3", "--env|MAX_STEP|did you mean MAX_STEPS?"),
    (
        "local",
        f"{GROUP} --env LEARNING_RATE=3",
        "--env|LEARNING_RATE|RLHF_OPTIMIZER__LEARNING_RATE",
    ),
    ("local", f"{GROUP} --follow trainer", "--follow|trainer|ppo-trainer"),
    ("local", f"{GROUP} --num-nodes rollout=2", "--num-nodes|rollout|rollout-server"),
    ("local", f"{GROUP} --grace soon", "--grace|soon|10s"),
    ("local", f"{GROUP} --graces 3s", "--graces|3s|did you mean --grace?"),
    ("doctor", "nothing.yaml", "YAML|nothing.yaml|rlhf-math-jobgroup.yaml"),
    ("doctor", "--task trainer", "--task|trainer|ppo-trainer"),
    ("doctor", "--gpus 8", "--gpus|give --plan too"),
    ("doctor", "--gpu-memory-gb big", "--gpu-memory-gb|big|give one, such as 8"),
    (
        "trainer",
        "--trainer.lerning_rate 1",
        "--trainer.lerning_rate|1|--optimizer.learning_rate",
    ),
    ("trainer", "--learning-rate 1", "--learning-rate|--optimizer.learning_rate"),
    ("trainer", "--model BASE", "--model|there is no setting model|did you mean --model.name?"),
    ("trainer", "--algorithm grpo", "--algorithm|grpo|did you mean --algorithm.name?"),
    ("trainer", "--algorithm.name gropo", "algorithm.name|gropo|did you mean grpo?"),
    ("trainer", "--trainer.max_steps", "--trainer.max_steps|it has no value"),
    ("trainer", "--trainer.batch_size 0", "trainer.batch_size|0|greater than 0"),
    ("trainer", "--trackers.names wandbb", "trackers.names|wandbb|did you mean wandb?"),
    ("trainer", "--config nothing.yaml", "--config|nothing.yaml|name a YAML file"),
    ("trainer", "--lora.alpha 16", "lora.alpha|lora.rank is 0|leave it out"),
    ("services.data", "--data.sorce math", "--data.sorce|math|did you mean --data.source?"),
    ("services.data", "--data.port 99999", "data.port|99999|65535"),
    ("services.reward", "--reward.functions mth", "reward.functions|mth|did you mean math?"),
    (
        "services.reward",
        "--reward.functions judge",
        "reward.functions.judge.url|it is missing|give it",
    ),
    ("services.rollout", "--rollout.engine sglng", "rollout.engine|sglng|did you mean sglang?"),
    ("services.replay", "--replay.reuse_ratio 1", "replay.reuse_ratio|1|less than 1"),
    (
        "services.replay",
        "--replay.reuse_ratio 0.5 --replay.priority advntage",
        "replay.priority|advntage|did you mean advantage?",
    ),
    ("services.engine", "", "--model-path|add it"),
    (
        "environment",
        "RLHF_TRAINER__LERNING_RATE=1",
        "RLHF_TRAINER__LERNING_RATE|RLHF_OPTIMIZER__LEARNING_RATE?",
    ),
    ("environment", "BATCH_SIZE=many", "trainer.batch_size|many|a valid integer"),
    ("environment", "RLHF_TRAINER=3", "RLHF_TRAINER|RLHF_SECTION__FIELD"),
]


@pytest.mark.parametrize(("program", "words", "told"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_typical_mistake_is_reported_in_the_terms_of_the_program(
    program: str,
    words: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    base_model: Path,
    tmp_path: Path,
) -> None:
    for name, text in (
        ("latin1.csv", b"question,answer\ncaf\xe9,3\n".decode("latin1")),
        ("weightless/config.json", "{}"),
        ("mute/config.json", '{"architectures": ["LlamaForCausalLM"]}'),
        ("mute/model.safetensors", ""),
        ("bert/config.json", '{"architectures": ["BertForMaskedLM"]}'),
        ("bert/model.safetensors", ""),
        ("bert/tokenizer.json", "{}"),
        ("run/config.json", '{"trainer": {"max_steps": 4}}'),
        ("run/checkpoints/step_000002/config.json", "{}"),
        ("run/checkpoints/step_000004/config.json", "{}"),
        ("ended/metrics.jsonl", '{"step": 1}\n'),
        ("ended/checkpoints/step_000002/config.json", "{}"),
        ("ended/checkpoints/step_000004/config.json", "{}"),
        ("audited/metrics.jsonl", '{"step": 1}\n'),
        ("audited/audit.jsonl", RECORD),
        ("adapter/adapter_config.json", '{"base_model_name_or_path": "/srv/gone"}'),
        ("adapter/adapter_model.safetensors", ""),
        ("rows.jsonl", '{"foo": 1}'),
        ("cut.jsonl", '{"foo": 1 "bar": 2}\n'),
        ("broken.yaml", "{\n"),
        ("text.yaml", "root:x:0:0"),
        ("twice.yaml", "trainer: {batch_size: 4}\ntrainer: {max_steps: 3}\n"),
        ("twice.jsonl", '{"question": "1?", "answer": "1", "answer": "2"}'),
        ("semicolons.csv", "question;answer\n1?;1\n"),
        ("config.json", "{"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "latin1")
    words = words.replace("FOLDER", str(tmp_path)).replace("BASE", str(base_model))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as caught:
        run(lambda: PROGRAMS[program](words.split()), "")
    answer = capsys.readouterr().err
    assert caught.value.code == 2
    assert answer.startswith("error: ")
    assert len(answer.splitlines()) == 1
    assert " · field: " in answer
    assert " · remedy: " in answer
    for part in told.replace("FOLDER", str(tmp_path)).split("|"):
        assert part in answer, answer
    for never in ("Value error", "Input should", "pydantic", "Traceback", "^", "TrainerConfig"):
        assert never not in answer


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"lerning_rate": 1}, "lerning_rate|1|did you mean learning_rate?"),
        ({"repetition_penalty": 1.1}, "repetition_penalty|1.1|leave it out"),
        ({"learning_rate": "fast"}, "learning_rate|fast|a valid number"),
        ({"trainer_type": "gropo"}, "trainer_type|gropo|did you mean grpo?"),
        ({"num_generations": 0}, "num_generations|0|equal to 1"),
        ({"report_to": "wandbb"}, "report_to|wandbb|did you mean wandb?"),
        ({"settings": {"algorithm.entropy": 1}}, "algorithm.entropy|1|algorithm.entropy_coef"),
    ],
)
def test_a_mistake_in_the_python_api_is_reported_with_its_field(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**fields)
    assert caught.value.field
    assert caught.value.remedy
    for part in told.split("|"):
        assert part in str(caught.value)


SERVE = ("trainer.report", "trainer.dashboard")
"""Commands whose pages FastAPI serves."""
SERVICES = ["data", "rollout", "reward", "replay", "environment", "engine"]
COMMAND_MODULES = [module for module, _ in COMMANDS.values()]
MODULES = [
    *(module for module in COMMAND_MODULES if module not in SERVE),
    "trainer",
    *SERVE,
    *(f"services.{name}" for name in SERVICES),
]
LIGHT = """
import runpy, sys
unwanted = {"torch", "transformers", "sglang", "fastapi"}
for module in sys.argv[1:]:
    if module in SERVE:
        unwanted -= {"fastapi"}
    for word in ("--help", "--nonsense"):
        sys.argv = [module, word]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert end.code == (0 if word == "--help" else 2), (module, word, end.code)
    assert not unwanted & set(sys.modules), module
""".replace("SERVE", repr(SERVE))
REFUSED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 2, end.code
assert not {"torch", "transformers"} & set(sys.modules)
"""
SCRIPT = """
import sys
from rlhf_math import GRPOConfig, GRPOTrainer, ModelConfig, OnlineRLTrainer, RLOOConfig, RLOOTrainer
from rlhf_math import CompositeRewardFunction, GSM8KLoader, TrainerConfig, TrlParser
from rlhf_math.rewards import accuracy_reward

for wrong in ({"learnin_rate": 1}, {"learning_rate": "much"}, {"num_generations": 3}):
    try:
        GRPOConfig(**wrong)
    except Exception as error:
        assert error.field, wrong
    else:
        raise AssertionError(wrong)
assert not {"torch", "transformers", "sglang", "fastapi"} & set(sys.modules)
"""


@pytest.mark.integration
def test_a_run_that_cannot_answer_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints/step_000007").mkdir(parents=True)
    for module, more in (
        ("trainer.audit", []),
        ("trainer.what_if.fork", ["--set", "optimizer.learning_rat=1"]),
    ):
        words = [module, str(tmp_path), "--step", "7", *more]
        done = subprocess.run(
            [sys.executable, "-c", REFUSED, *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_help_and_wrong_arguments_of_every_program_do_not_wait_for_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *MODULES], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(MODULES)


@pytest.mark.integration
@pytest.mark.skipif(cuda_of_driver() is not None, reason="with a driver, torch looks for the GPU")
def test_the_imports_and_the_refused_settings_of_a_script_do_not_wait_for_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
