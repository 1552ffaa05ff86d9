"""Makes sixty mistakes as a newcomer would, and times what each program says.

    python -m checks.mistakes [--only 3 17] [--json mistakes.json]

Every mistake is a process of its own: a command with a wrong argument, setting or file, or a short
script with TRL's names. A mistake counts as answered when the process ends by itself with an error
whose last line has the field and what to do about it (`told`). The table shows the seconds until
then, of the wall and of processors (which hardly depend on what else the machine does), before any
model is loaded. For a script they include the import of the package, whose time the table has by
itself too, and once a trainer is made, of torch and transformers.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import command_parser
from benchmarks.processes import ROOT
from common.process.cli import positive
from common.process.run_lock import RunLock

BASE = ".cache/tiny-base"
LIMIT_S = 120
GROUP = "jobgroup/rlhf-math-jobgroup.yaml"
TINY = "--env RUN_CONFIG=jobgroup/configs/tiny-cpu.yaml"
SCRIPT = """\
from rlhf_math import GRPOConfig, GRPOTrainer

rows = [{"prompt": f"what is {n} + 1?", "answer": str(n + 1)} for n in range(32)]


def config(**fields):
    return GRPOConfig(output_dir="FOLDER/trl", max_steps=2, num_generations=4, **fields)


def reward(completions, **columns):
    return [1.0 for _ in completions]


"""
"""The beginning of every script."""


@dataclass(frozen=True)
class Mistake:
    """One mistake."""

    about: str
    command: str
    """The program and its arguments, or the last lines of a script with TRL's names."""
    told: str
    """Parts of the answer, separated by `|`."""


MISTAKES = [
    Mistake(
        "a file in Latin-1",
        "trainer.train_math --model BASE --dataset FOLDER/latin1.csv",
        "--dataset|latin1.csv is not in UTF-8|save the file in UTF-8",
    ),
    Mistake(
        "an empty file",
        "trainer.train_math --model BASE --dataset FOLDER/empty.jsonl",
        "--dataset|has no problems|add rows",
    ),
    Mistake(
        "a row without an answer",
        "trainer.train_math --model BASE --dataset FOLDER/gap.jsonl",
        "--dataset|gap.jsonl, line 3: column 'answer' is None|repair the row",
    ),
    Mistake(
        "a document in the place of data",
        "trainer.train_math --model BASE --dataset FOLDER/notes.docx",
        "--dataset|not of a known format|.jsonl, .json, .csv, .parquet",
    ),
    Mistake(
        "too few problems for a step",
        "trainer.train_math --model BASE --dataset tiny --num-samples 3",
        "--gradient-accumulation-steps|too few for one step|lower it or",
    ),
    Mistake(
        "answers of no tokens",
        "trainer.train_math --model BASE --dataset tiny --max-new-tokens 0",
        "--max-new-tokens|0|greater than 0",
    ),
    Mistake(
        "the directory of an earlier run",
        "trainer.train_math --model BASE --dataset tiny --output-dir FOLDER/run",
        "--output-dir|already has a run|--resume",
    ),
    Mistake(
        "a directory that cannot be made",
        "trainer.train_math --model BASE --dataset tiny --output-dir FOLDER/empty.jsonl/out",
        "--output-dir|not writable|name another directory",
    ),
    Mistake(
        "a misspelt schedule",
        "trainer.train_math --model BASE --dataset tiny --lr-scheduler-type cosin",
        "--lr-scheduler-type|cosin|did you mean cosine?",
    ),
    Mistake(
        "a model directory without weights",
        "trainer.train_math --model FOLDER/weightless --dataset tiny",
        "--model|has no weights|copy them there",
    ),
    Mistake(
        "a reward function where there is no choice",
        "trainer.train_math --model BASE --dataset tiny --set reward.functions=math",
        "--set reward.functions|does not apply|leave it out",
    ),
    Mistake(
        "a server that is not running",
        "trainer.evaluate_model --model http://127.0.0.1:9/v1 --dataset tiny",
        "--model|cannot be reached|check that it is running",
    ),
    Mistake(
        "a mistyped address",
        "trainer.evaluate_model --model htp://host/v1 --dataset tiny",
        "--model|not the address of a server|http://HOST:PORT/v1",
    ),
    Mistake(
        "a column that is called otherwise",
        "trainer.evaluate_model --model BASE --dataset FOLDER/qa.jsonl "
        "--set data.answer_field=solution",
        "--dataset|there are question, solutions|data.answer_field",
    ),
    Mistake(
        "more problems than there are",
        "trainer.evaluate_model --model BASE --dataset tiny --num-samples 100000",
        "--num-samples|only 1024 problems|ask for at least one and at most this many",
    ),
    Mistake(
        "an adapter whose model is gone",
        "trainer.evaluate_model --model FOLDER/adapter --dataset tiny",
        "--model|/srv/models/gone, which is not there|restore that model",
    ),
    Mistake(
        "a report into a directory that is not there",
        "trainer.evaluate_model --model BASE --dataset tiny --output-file FOLDER/no/r.json",
        "--output-file|no such directory|name a file",
    ),
    Mistake(
        "chats without their column",
        "trainer.sft --model.name BASE --data.source FOLDER/chats.jsonl",
        "data.source|there are messages|data.messages_field",
    ),
    Mistake(
        "chats without an answer",
        "trainer.sft --model.name BASE --data.source FOLDER/unanswered.jsonl "
        "--data.messages_field messages",
        "line 1|must end with the assistant's answer|data.map",
    ),
    Mistake(
        "an algorithm for fine-tuning",
        "trainer.sft --model.name BASE --data.source tiny --algorithm.name ppo",
        "algorithm.name|not read|leave it out",
    ),
    Mistake(
        "a rate with a slip of the finger",
        "trainer.sft --model.name BASE --data.source tiny --optimizer.learning_rate 2e-5x",
        "optimizer.learning_rate|2e-5x|a valid number",
    ),
    Mistake(
        "a model that is not there",
        "trainer.sft --model.name FOLDER/base --data.source tiny",
        "model.name|no such directory|correct the path",
    ),
    Mistake(
        "a folder without runs",
        "trainer.compare FOLDER/nothing",
        "RUN_DIR|contains none|name the directory of a run",
    ),
    Mistake(
        "a step without an evaluation",
        "trainer.compare FOLDER/run --step 7",
        "--step|7|name one of",
    ),
    Mistake(
        "a directory that another run uses",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/busy",
        "RUN_DIR|is using this directory|end that run",
    ),
    Mistake(
        "a short token",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/o --env API_TOKEN=secret",
        "API_TOKEN|6 characters|openssl rand -hex 32",
    ),
    Mistake(
        "a misspelt algorithm",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/o --env RLHF_ALGORITHM__NAME=grppo",
        "algorithm.name|grppo|did you mean grpo?",
    ),
    Mistake(
        "a variable without a value",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/o --env MAX_STEPS",
        "--env|MAX_STEPS|--env MAX_STEPS=VALUE",
    ),
    Mistake(
        "a reward function that cannot be imported",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/o "
        "--env RLHF_REWARD__FUNCTIONS=my_rewards:Brief",
        "reward.functions|no module my_rewards|PYTHONPATH",
    ),
    Mistake(
        "settings in the place of a job group",
        "jobgroup.local examples/own_reward/own_reward.yaml",
        "YAML|a job group needs a header|jobgroup/rlhf-math-jobgroup.yaml",
    ),
    Mistake(
        "a misspelt argument",
        "GRPOConfig(learning_rte=1e-5)",
        "GRPOConfig has no field|learning_rte|did you mean learning_rate?",
    ),
    Mistake(
        "groups that do not fit the batch",
        "GRPOConfig(per_device_train_batch_size=8, num_generations=3)",
        "per_device_train_batch_size|not a multiple of num_generations|change one",
    ),
    Mistake(
        "a data set without prompts",
        'GRPOTrainer("BASE", reward, args=config(), train_dataset=[{"text": "1+1?"}] * 32).train()',
        "train_dataset|no column prompt or question; there are text|rename the column",
    ),
    Mistake(
        "a reward function that returns one number",
        'GRPOTrainer("BASE", lambda completions, **_: 1.0, config(), rows).train()',
        "reward_funcs|returned a float for 2 completions|a number for each completion",
    ),
    Mistake(
        "the arguments of another trainer",
        "from transformers import TrainingArguments as Arguments\n"
        'GRPOTrainer("BASE", reward, Arguments("o"), rows)',
        "args|of type TrainingArguments|give a GRPOConfig",
    ),
    Mistake(
        "a checkpoint that is not there",
        'GRPOTrainer("BASE", reward, config(), rows).train("FOLDER/trl/checkpoint-5")',
        "resume_from_checkpoint|no such checkpoint|leave it out",
    ),
    Mistake(
        "a section that stands twice",
        f"jobgroup.local {GROUP} --env RUN_CONFIG=FOLDER/twice.yaml --env RUN_DIR=FOLDER/o",
        "--config|line 2: the key trainer stands twice|merge the two",
    ),
    Mistake(
        "a key that stands twice in a row",
        "trainer.train_math --model BASE --dataset FOLDER/twice.jsonl",
        "--dataset|the key 'answer' stands twice|repair the file",
    ),
    Mistake(
        "a CSV with semicolons",
        "trainer.train_math --model BASE --dataset FOLDER/semicolons.csv",
        "--dataset|separates its columns by ';'|save it with commas",
    ),
    Mistake(
        "a role of another format",
        "trainer.sft --model.name BASE --data.source FOLDER/human.jsonl "
        "--data.messages_field messages",
        "line 1|has the role 'human'|rename it to 'user'",
    ),
    Mistake(
        "a model without a tokenizer",
        f"jobgroup.local {GROUP} {TINY} --env RUN_DIR=FOLDER/o --env MODEL_NAME=FOLDER/mute",
        "model.name|has no tokenizer|copy its files there",
    ),
    Mistake(
        "the directory of a run as a model",
        "trainer.evaluate_model --model FOLDER/stepless --dataset tiny",
        "--model|the directory of a run|checkpoints/step_000002",
    ),
    Mistake(
        "a BERT",
        "trainer.train_math --model FOLDER/bert --dataset tiny",
        "--model|not a causal language model but a BertForMaskedLM|writes text",
    ),
    Mistake(
        "the report of a directory that is not there",
        "trainer.report FOLDER/absent",
        "RUN_DIR|there is no such run directory|name the directory of a run",
    ),
    Mistake(
        "the report of a model",
        "trainer.report BASE",
        "RUN_DIR|this is not a run directory|name the directory of a run",
    ),
    Mistake(
        "the report of a run without a step",
        "trainer.report FOLDER/stepless",
        "RUN_DIR|no step is recorded|rlhf diagnose",
    ),
    Mistake(
        "the comparison of a run without a step",
        "trainer.compare FOLDER/stepless",
        "RUN_DIR|no step is recorded|rlhf diagnose",
    ),
    Mistake(
        "the audit of a run without a step",
        "trainer.audit FOLDER/stepless --step 1",
        "RUN_DIR|no step is recorded|rlhf diagnose",
    ),
    Mistake(
        "the diagnosis of a folder",
        "trainer.diagnose FOLDER/nothing",
        "RUN_DIR|this is not a run directory|name the directory of a run",
    ),
    Mistake(
        "the dashboard of a folder",
        "trainer.dashboard FOLDER/nothing",
        "RUN_DIR|contains none|name the directory of a run",
    ),
    Mistake(
        "the name of a reward function",
        'GRPOTrainer("BASE", "accuracy_reward", config(), rows)',
        "reward_funcs|accuracy_reward|give a function itself",
    ),
    Mistake(
        "chats for a base model",
        'chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]\n'
        'GRPOTrainer("FOLDER/base", reward, config(), chats).train()',
        'settings["model.chat_template"]|a problem is a chat|use an instruct model',
    ),
    Mistake(
        "a model of a script without a tokenizer",
        'GRPOTrainer("FOLDER/mute", reward, config(), rows).train()',
        "field: model ·|has no tokenizer|copy its files there",
    ),
    Mistake(
        "a prompt without room for an answer",
        'GRPOTrainer("BASE", reward, config(max_completion_length=10**6), rows).train()',
        "max_completion_length|context has only|lower it to",
    ),
    Mistake(
        "an argument file with a key twice",
        "from rlhf_math import TrlParser\n"
        'TrlParser(GRPOConfig).parse_args_and_config(["--config", "FOLDER/twice.yaml"])',
        "--config|line 2: the key trainer stands twice|one argument a line",
    ),
]
FILES = {
    "latin1.csv": "question,answer\ncafé,3\n".encode("latin1"),
    "empty.jsonl": b"",
    "gap.jsonl": b'{"question": "1?", "answer": "1"}\n{"question": "2?", "answer": "2"}\n'
    b'{"question": "3?", "answer": null}\n',
    "notes.docx": b"notes",
    "qa.jsonl": b'{"question": "1?", "solutions": "1"}\n' * 20,
    "chats.jsonl": b'{"messages": [{"role": "user", "content": "1?"}, '
    b'{"role": "assistant", "content": "1"}]}\n',
    "unanswered.jsonl": b'{"messages": [{"role": "user", "content": "1?"}]}\n',
    "weightless/config.json": b'{"model_type": "qwen2"}',
    "adapter/adapter_config.json": b'{"base_model_name_or_path": "/srv/models/gone"}',
    "adapter/adapter_model.safetensors": b"",
    "run/config.json": b"{}",
    "run/metrics.jsonl": b'{"step": 2, "total_steps": 2, "reward": 0.5, "seconds": {}}\n',
    "nothing/notes.txt": b"",
    "twice.yaml": b"trainer: {batch_size: 4}\ntrainer: {max_steps: 3}\n",
    "twice.jsonl": b'{"question": "1?", "answer": "1", "answer": "2"}\n',
    "semicolons.csv": b"question;answer\n1?;1\n",
    "human.jsonl": b'{"messages": [{"role": "human", "content": "1?"}, '
    b'{"role": "gpt", "content": "1"}]}\n',
    "mute/config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "mute/model.safetensors": b"",
    "bert/config.json": b'{"architectures": ["BertForMaskedLM"]}',
    "bert/model.safetensors": b"",
    "bert/tokenizer.json": b"{}",
    "stepless/config.json": b'{"trainer": {"max_steps": 2}}',
    "stepless/checkpoints/step_000002/config.json": b"{}",
}


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    number: int
    about: str
    command: str
    seconds: float
    cpu_seconds: float
    status: int
    message: str
    answered: bool


def main() -> None:
    parser = command_parser("checks.mistakes", __doc__)
    parser.add_argument("--only", type=positive, nargs="+", metavar="N", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answers there")
    arguments = parser.parse_args()
    numbers = arguments.only or range(1, len(MISTAKES) + 1)

    answers = []
    with tempfile.TemporaryDirectory(prefix="mistakes-") as name, folder(Path(name)):
        load = os.getloadavg()[0]
        seconds, cpu_seconds = timed(["-c", "from rlhf_math import GRPOTrainer"])[1:]
        print(
            f"load {load:.1f}; the import of GRPOTrainer alone takes {seconds:.1f} s, of which "
            f"{cpu_seconds:.1f} s of a processor\n"
        )
        print("| | mistake | program | s | CPU s | answer |\n|---|---|---|---:|---:|---|")
        for number in numbers:
            answer = made(number, MISTAKES[number - 1], Path(name))
            answers.append(answer)
            print(row(answer), flush=True)

    answered = sum(answer.answered for answer in answers)
    slow = [answer.number for answer in answers if answer.cpu_seconds > 5]
    print(f"\n{answered} of {len(answers)} answered; over 5 s of a processor: {slow or 'none'}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
    if answered < len(answers):
        raise SystemExit(1)


@contextmanager
def folder(directory: Path) -> Iterator[None]:
    """Fills a directory with the files of the mistakes; a run holds `busy` meanwhile."""
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    # A model whose tokenizer has no chat template.
    shutil.copytree(ROOT / BASE, directory / "base")
    (directory / "base/chat_template.jinja").unlink()
    with RunLock(directory / "busy", "another"):
        yield


def made(number: int, mistake: Mistake, directory: Path) -> Answer:
    """Makes a mistake and returns the answer to it."""
    text = mistake.command.replace("BASE", BASE).replace("FOLDER", str(directory))
    if is_script(mistake):
        words = ["-c", SCRIPT.replace("FOLDER", str(directory)) + text]
    else:
        words = ["-m", *text.split()]
    done, seconds, cpu_seconds = timed(words)

    lines = [line for line in done.stderr.splitlines() if line.strip()] or [""]
    message = lines[-1].replace(str(directory), "FOLDER").removeprefix("common.errors.ConfigError")
    is_told = all(part in message for part in mistake.told.split("|"))
    return Answer(
        number=number,
        about=mistake.about,
        command=mistake.command,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        status=done.returncode,
        message=message.removeprefix("error").removeprefix(": "),
        answered=is_told and done.returncode in (1, 2),
    )


def is_script(mistake: Mistake) -> bool:
    return re.match(r"[a-z]+\.\w+ ", mistake.command) is None


def timed(words: list[str]) -> tuple["subprocess.CompletedProcess[str]", float, float]:
    """Runs Python with these arguments; returns how it ended, its seconds, and those of
    processors.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    used = cpu_seconds_of_children()
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done, time.perf_counter() - begin, cpu_seconds_of_children() - used


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def row(answer: Answer) -> str:
    """Returns an answer as a row of a table in Markdown."""
    program = "a script" if "(" in answer.command else answer.command.split()[0]
    message = answer.message.replace("|", "\\|")
    verdict = "" if answer.answered else f"**not answered (status {answer.status})** "
    seconds = [f"{answer.seconds:.1f}", f"{answer.cpu_seconds:.1f}"]
    cells = [str(answer.number), answer.about, f"`{program}`", *seconds]
    return f"| {' | '.join(cells)} | {verdict}{message} |"


if __name__ == "__main__":
    main()
