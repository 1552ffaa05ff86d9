"""An OpenEnv environment that catches everything: `uvicorn tests.chaos.episodes.openenv_app:app`."""

# mypy: ignore-errors

import os
import random
from pathlib import Path
from uuid import uuid4

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from tests.chaos.episodes.swallows import NUMBERS, UNIT, note

STEPS = 2


class Say(Action):
    text: str


class Heard(Observation):
    heard: str = ""


class Talks(Environment):
    """Ends after a few steps; the last one's reward is the number of the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **_) -> Heard:
        self._state = State(episode_id=episode_id or str(uuid4()))
        self.number = random.randrange(NUMBERS)
        self.calls = []
        return Heard(heard="Begin.")

    def step(self, action: Say, **_) -> Heard:
        self._state.step_count += 1
        self.calls.append({"text": action.text, "error": None})
        done = self._state.step_count >= STEPS
        if done:
            note(Path(os.environ["CHAOS_LOG"]), {"number": self.number, "calls": self.calls})
        return Heard(heard="And then?", done=done, reward=self.number * UNIT if done else 0.0)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Talks, Say, Heard, max_concurrent_envs=64)
