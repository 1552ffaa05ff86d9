"""A coding agent of the standard library: runs what the model writes as shell commands and shows it
what they print, until it writes `done`.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any


def ask(messages: list[Any]) -> str:
    request = urllib.request.Request(  # noqa: S310
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    messages = json.load(sys.stdin)["messages"]
    while True:
        said = ask(messages)
        if said == "done":
            return
        ran = subprocess.run(["sh", "-c", said], capture_output=True, text=True)
        output = f"status {ran.returncode}\n{ran.stdout}{ran.stderr}"
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": output})


if __name__ == "__main__":
    main()
