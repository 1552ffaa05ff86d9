"""A coding agent of the standard library: runs the model's calls of the tool `bash`, and shows it
what they print, until an answer has no call or a command prints the line that submits the work.

It talks like mini-swe-agent with `mini/mini.yaml`, but starts in a tenth of a second.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = "Repair the library."
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages: list[Any]) -> Any:
    """Returns the model's next message."""
    request = urllib.request.Request(  # noqa: S310
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [BASH]}).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        return json.load(answer)["choices"][0]["message"]


def run(command: str) -> str:
    """Runs a command; returns what it printed, after its status if that is not 0."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    status = f"status {done.returncode}\n" if done.returncode else ""
    return status + done.stdout + done.stderr


def main() -> None:
    """Works on the task that is on standard input."""
    task = json.load(sys.stdin)["prompt"]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
    ]
    while True:
        message = ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or [None]:
            if call is None:
                return
            arguments = json.loads(call["function"]["arguments"])
            output = run(str(arguments.get("command")))
            if output.startswith(SUBMITTED):
                return
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


if __name__ == "__main__":
    main()
