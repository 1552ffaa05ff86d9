"""Code that all tasks of the job group share. No torch.

The rooms, each of which imports only those below it (a contract in `pyproject.toml`):

    prompts · models            a row as a prompt's text and tokens; what is known of a model
    clients · settings          one client per service; every setting once
    wire · process · weights    what is sent; what every process needs; files of weights
    errors                      the error type of the system
"""

from typing import Any

VERSION = "0.1.0"
"""Version of the system; the same as in `pyproject.toml`."""
Json = dict[str, Any]
"""A JSON object."""
