"""`python -m tests.support.workers.trl_script_runner FOLDER…`: runs the script in each folder, one
after the other, as the main program; the folder gets its output, and `failed` if it ends with an
error."""

import contextlib
import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path

for folder in map(Path, sys.argv[1:]):
    os.chdir(folder)
    sys.argv = ["script.py", *json.loads((folder / "words.json").read_text())]
    with (
        (folder / "output").open("w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            runpy.run_path("script.py", run_name="__main__")
        except BaseException:
            (folder / "failed").write_text(traceback.format_exc())
    # A script that sets up logging does not do it for the next one.
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
