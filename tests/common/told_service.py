"""Runs a program as `python -m` does, but its log tells of its work three times a second: told_service.py MODULE ARGUMENT…"""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
story: Any = importlib.import_module("services.http.story")
story.EVERY_S = 0.3
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
