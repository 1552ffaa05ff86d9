"""A plain script that uses the Python API ends at once, prints only what it prints itself, and
leaves no process behind."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration
CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs ignore\n"
MATH = r"""
import asyncio, gc, os, threading, time
from trainer import MathRewardFunction

def grade(answer=r"\frac{x^2}{2}", count=1, **settings):
    completions = [[{"role": "assistant", "content": "\\boxed{" + answer + "}"}]] * count
    return MathRewardFunction(**settings)(completions, ground_truth=[r"\frac{1}{2}x^2"] * count)

def interrupt():
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()

function = MathRewardFunction(timeout_s=3600)
hard = dict(completions=[[{"role": "assistant", "content": r"\boxed{\sum_{i=1}^{1000000000} \frac{1}{i}}"}]], ground_truth=["x"])
"""
ASYNC = """
import asyncio
from services.reward.functions.plain import PlainFunction

async def background(completions, **kwargs):
    background.task = asyncio.create_task(asyncio.sleep(3600))
    return [1.0] * len(completions)
"""
JUDGE = """
import os, socket, threading
from trainer import JudgeRewardFunction

server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
judge = JudgeRewardFunction(url, "judge", timeout_s=3600, concurrency=2)

def ask():
    judge([[{"role": "assistant", "content": "5"}]] * 4, prompt=["2 + 3"] * 4)
"""
CODE = r"""
import logging, os, threading, time
from trainer import CodeRewardFunction

logging.getLogger("services").setLevel(logging.ERROR)
code = CodeRewardFunction(timeout_s=3600, slots=2, sandbox="none")

def run():
    program = "```python\nwhile True: pass\n```"
    code([[{"role": "assistant", "content": program}]] * 4, test_cases=[[{"input": "1", "output": "1"}]] * 4)
"""
TRACEBACK = r"(Traceback \(most recent call last\):\n(  .*\n)+)"
INTERRUPTED = (TRACEBACK + "KeyboardInterrupt\n", -2)
SILENT = ("", 0)
SCRIPTS = {
    "used": (MATH + "print(grade())", "[1.0]\n", *SILENT),
    "dropped": (MATH + "print(grade()); gc.collect(); time.sleep(1); gc.collect()", "[1.0]\n", *SILENT),
    "closed": (MATH + "function.close(); print(function(**hard | {'ground_truth': [r'\\sum_{i=1}^{1000000000} \\frac{1}{i}']})); function.close()",
               "[1.0]\n", *SILENT),
    "failed": (MATH + "print(grade()); raise ValueError('x')", "[1.0]\n", TRACEBACK + "ValueError: x\n", 1),
    "interrupted": (MATH + "interrupt(); function(**hard)", "", *INTERRUPTED),
    "in a daemon": (MATH + "threading.Thread(target=function, kwargs=hard, daemon=True).start(); time.sleep(2); print('end')",
                    "end\n", *SILENT),
    "in many daemons": (MATH + "def work():\n    while True: grade(count=20)\n"
                        "for _ in range(4): threading.Thread(target=work, daemon=True).start()\n"
                        "time.sleep(3); print('end')", "end\n", *SILENT),
    "in a thread": (MATH + "threading.Thread(target=lambda: print(grade())).start()", "[1.0]\n", *SILENT),
    "in asyncio": (MATH + "async def main(): print(await asyncio.to_thread(grade))\nasyncio.run(main())", "[1.0]\n", *SILENT),
    "async function": (ASYNC + "print(PlainFunction(background)([[{'role': 'assistant', 'content': '5'}]]))",
                       "[1.0]\n", *SILENT),
    "judge in a daemon": (JUDGE + "threading.Thread(target=ask, daemon=True).start(); server.accept(); print('end')",
                          "end\n", *SILENT),
    "judge interrupted": (JUDGE + "threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start(); ask()", "", *INTERRUPTED),
    "code in a daemon": (CODE + "threading.Thread(target=run, daemon=True).start(); time.sleep(2); print('end')",
                         "end\n", *SILENT),
    "code interrupted": (CODE + "threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start(); run()", "", *INTERRUPTED),
}  # fmt: skip
"""The script, what it prints, a pattern of what Python adds on standard error, and the exit
status."""
QUICK = ("dropped", "in a daemon", "judge interrupted")
TRAINING = """
import os, sys, threading
from trainer import GRPOConfig, GRPOTrainer, MathRewardFunction, ModelEvaluator

rows = [{"prompt": f"What is {i} + 1?", "ground_truth": "x"} for i in range(4)]
graded = threading.Event()

async def short(completions, **kwargs):
    graded.set()
    return [1 / (1 + len(completion)) for completion in completions]

class Failing:
    def on_step_end(self, args, state, control, **kwargs):
        raise ValueError("x")

def trainer(max_steps=1000):
    args = GRPOConfig(output_dir="run", max_steps=max_steps, per_device_train_batch_size=4, num_generations=2,
                      max_completion_length=8, use_cpu=True, verbose=False, save_strategy="no")
    functions = [short, MathRewardFunction()]
    return GRPOTrainer(model=sys.argv[1], reward_funcs=functions, args=args, train_dataset=rows)

def interrupt():
    graded.wait()
    os.kill(os.getpid(), signal.SIGINT)
"""
TRAINED = {
    "trained": ("print(trainer(max_steps=1).train().global_step)", "1\n", *SILENT),
    "not trained": ("trainer(); print('end')", "end\n", *SILENT),
    "evaluated": ("evaluator = ModelEvaluator(sys.argv[1], max_new_tokens=8, progress=False, device='cpu')\n"
                  "evaluator.evaluate(rows, MathRewardFunction()); print('end')", "end\n", *SILENT),
    "failed": ("it = trainer(); it.add_callback(Failing()); it.train()", "", TRACEBACK + "ValueError: x\n", 1),
    "interrupted": ("threading.Thread(target=interrupt, daemon=True).start(); trainer().train()", "", *INTERRUPTED),
    "in a daemon": ("threading.Thread(target=trainer().train, daemon=True).start(); graded.wait(); print('end')",
                    "end\n", *SILENT),
}  # fmt: skip
"""The same for scripts that train."""


def session_of(stat: Path) -> int | None:
    """Returns the session of a process by its `/proc/PID/stat`; None if it has ended."""
    try:
        state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(session)


def check_ends(
    script: str, printed: str, pattern: str, status: int, folder: Path, *arguments: str
) -> None:
    """Runs a script as a user does, and checks what it prints and that it leaves no process."""
    (folder / "script.py").write_text(CTRL_C + script)
    command = [sys.executable, "script.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException:  # pytest's timeout: the script hangs
            process.kill()
            raise
    assert (out, process.returncode) == (printed, status), err
    assert re.fullmatch(pattern, err), err

    left = []
    for _ in range(600):  # a process that was killed may still be ending
        left = [
            stat for stat in Path("/proc").glob("[0-9]*/stat") if session_of(stat) == process.pid
        ]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(
        f"these processes are left: {[(stat.parent / 'cmdline').read_bytes() for stat in left]}"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS],
)
def test_a_script_that_used_reward_functions_ends_silently(name: str, tmp_path: Path) -> None:
    check_ends(*SCRIPTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", TRAINED)
def test_a_script_that_trained_ends_silently(name: str, tmp_path: Path, base_model: Path) -> None:
    script, printed, pattern, status = TRAINED[name]
    # A trainer says once what differs from TRL, and a run that failed where its diagnosis is.
    pattern = rf"(unlike in TRL, .+\n)?{pattern}(diagnosis: .+\n)?"
    check_ends(TRAINING + script, printed, pattern, status, tmp_path, str(base_model.resolve()))
