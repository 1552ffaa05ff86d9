"""Plays the episodes of a step again, with the recorded answers in the place of an engine.

The environment runs again: its first messages, its tools and its rewards are compared with what the
run recorded. What the model read before each answer, and the seed of that answer, then say how an
engine can sample it again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.errors import ConfigError, ServiceError
from common.settings.config import Config
from common.wire.schemas import Completion, Group, Int32, Prompt
from services.environment.outcome import EpisodeRunner
from services.environment.outcome import Outcome as EpisodeOutcome
from services.environment.runners import load_runner, needs_gateway
from services.environment.service import session_seed
from services.environment.session import Session
from services.environment.template import Template
from trainer.audit.comparison import StageOutcome, first_difference
from trainer.audit.engine import Request
from trainer.audit.grading import GradedAnswer, answer_of_episode
from trainer.audit.recorded import RecordedStep
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.episodes import PLAYED, episode_request, replacing_seed
from trainer.rollouts.requests import row_of


@dataclass
class PlayedAgain:
    """What came of playing the episodes of a step again."""

    outcome: StageOutcome
    """What the stage `episodes` reports."""
    requests: list[Request] = field(default_factory=list)
    """One for every answer that the model gave."""
    given: int = 0
    """Episodes whose reward the environment gave again, as recorded."""
    wrong_reward: StageOutcome | None = None
    """The first reward of the environment that is another one."""
    answers: list[GradedAnswer] = field(default_factory=list)
    """Answers whose reward the run's reward functions gave."""


def play_again(
    recorded: RecordedStep, config: Config, rows: Mapping[str, Prompt], stops: Sequence[int]
) -> PlayedAgain:
    """Plays the episodes of the fresh groups. `rows` are those of the data set by id, `stops` the
    tokens that end an answer.
    """
    reason = ""
    if "environment" in recorded.start.given:
        reason = "the caller of the Python API gave the environment"
    elif not rows:
        reason = "the prompts, whose columns the environment reads, were not kept"
    elif needs_gateway(config.environment):
        reason = f"programs play the episodes ({config.environment.name})"
    runner = None
    try:
        if not reason:
            runner = load_runner(config.environment, "", config.runtime)
    except ConfigError as error:
        reason = f"the environment does not load: {error}"
    if runner is None:
        return PlayedAgain(StageOutcome("episodes", "not compared", reason))
    tokenizer = load_tokenizer(config.model)
    template = Template(tokenizer, list(stops), config.sampling.chat_template_kwargs)
    player = _Player(recorded, config, rows, template=template, runner=runner, stops=stops)
    return asyncio.run(player.play())


@dataclass
class _Player:
    recorded: RecordedStep
    config: Config
    rows: Mapping[str, Prompt]
    template: Template
    runner: EpisodeRunner
    stops: Sequence[int]
    played: PlayedAgain = field(
        default_factory=lambda: PlayedAgain(StageOutcome("episodes", "equal", ""))
    )

    async def play(self) -> PlayedAgain:
        """Returns what came of it; stops at the first episode that is another one."""
        count = 0
        first_row = 0
        outcome: StageOutcome | None = None
        for item in self.recorded.groups:
            group = item.group
            rows = dict(enumerate(group.completions, first_row))
            first_row += len(group.completions)
            if item.reused:
                continue
            for number in sorted({completion.episode or 0 for completion in rows.values()}):
                of_episode = {
                    row: completion
                    for row, completion in rows.items()
                    if (completion.episode or 0) == number
                }
                count += 1
                outcome = outcome or await self._play(group, number, of_episode)
        await self.runner.close()
        detail = f"{count} episodes of {self.config.environment.name} played again"
        self.played.outcome = outcome or StageOutcome("episodes", "equal", detail)
        return self.played

    async def _play(
        self, group: Group, number: int, rows: Mapping[int, Completion]
    ) -> StageOutcome | None:
        """Plays one episode; returns the outcome if it is another one."""
        name = f"episode {number} of group {group.id}"
        config = self.config
        row = row_of(group, self.rows)
        request = episode_request(
            config,
            row,
            request_id=group.id,
            n=config.sampling.group_size,
            position=group.position,
        )
        played = group.metadata.get(PLAYED)
        played_id = played[number] if played else f"{group.id}-{number}"
        request_id, _, place = played_id.rpartition("-")
        index, _, attempt = place.partition(".")
        # It was played in the place of a lost one, with another seed (`min_episodes`).
        if request_id != group.id:
            request.task.seed = replacing_seed(request.task.seed, group.position)
        answers = _RecordedAnswers(rows, self.stops)
        session = Session(
            name,
            self.template,
            answers.sample,
            limits=request.limits,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=session_seed(request.task.seed, int(index), attempt=int(attempt or 0)),
        )
        outcome = await self.runner.run(request.task, session, request.limits)
        session.close()

        self.played.requests += answers.requests
        asked = answers.unknown
        count = len(answers.requests)
        if asked is not None:
            # The environment said something else before this call than in the run.
            expected = answers.waiting[0][0].prompt if answers.waiting else []
            at = first_difference(expected, asked) or 0
            return _differs(
                f"{name}, before answer {count}, token {at}",
                f"the environment's text {self.template.text(expected[at:])!r}",
                repr(self.template.text(asked[at:])),
            )
        if outcome.status != "ok":
            return _differs(name, "an episode that ends", f"{outcome.status}: {outcome.detail}")
        if answers.waiting:
            total = count + len(answers.waiting)
            return _differs(
                name, f"{total} answers of the model", f"the end, after {count} answers"
            )
        self._compare_reward(name, list(rows.values()), outcome, row)
        return None

    def _compare_reward(
        self, name: str, rows: Sequence[Completion], outcome: EpisodeOutcome, prompt: Prompt
    ) -> None:
        recorded = rows[0]
        turns = [turn.reward or 0.0 for row in rows for turn in row.turns]
        again = outcome.turn_rewards or [0.0] * len(turns)
        # The environment leaves its answer to the reward functions, which grade it later.
        if outcome.reward is None:
            graded = answer_of_episode(
                name, prompt, outcome.answer, completion=rows[-1], of_turns=sum(turns)
            )
            self.played.answers.append(graded)
            return
        self.played.given += 1
        # All sequences of an episode carry its reward; the first one is compared.
        same = outcome.reward == recorded.reward and outcome.components == recorded.components
        if (same and turns == again) or self.played.wrong_reward is not None:
            return
        self.played.wrong_reward = StageOutcome(
            "rewards",
            "differs",
            f"rewards given again by {self.config.environment.name}",
            name,
            expected=f"{recorded.reward!r} ({recorded.components}), turns {turns}",
            found=f"{outcome.reward!r} ({outcome.components}), turns {again}",
        )


class _RecordedAnswers:
    """Answers the calls of one episode with what the run recorded."""

    def __init__(self, rows: Mapping[int, Completion], stops: Sequence[int]) -> None:
        self._stops = set(stops)
        self.waiting: list[tuple[Request, Completion]] = []
        """Answers that were not asked for yet, each a part of a completion. Their seeds are only
        known from the calls."""
        for row, completion in rows.items():
            assert completion.prompt_ids is not None, "a sequence of an episode has its own prompt"
            prompt = completion.prompt_ids.tolist()
            tokens = completion.token_ids.tolist()
            for turn in completion.turns:
                read = prompt + tokens[: turn.start]
                request = Request(row=row, prompt=read, seed=0, start=turn.start, end=turn.end)
                self.waiting.append((request, completion))
        self.requests: list[Request] = []
        self.unknown: list[int] | None = None
        """The tokens of a call that the run did not make."""

    async def sample(
        self, tokens: Int32, max_new_tokens: int, seed: int, stop: Sequence[str]
    ) -> Completion:
        """See `services.environment.session.Sample`. Raises ServiceError for another call than the
        run made.
        """
        asked = tokens.tolist()
        known = [place for place, (each, _) in enumerate(self.waiting) if each.prompt == asked]
        if not known or self.unknown is not None:
            self.unknown = self.unknown or asked
            raise ServiceError("the run made no such call")
        # Two calls of the same tokens get their answers in the order of the record.
        request, completion = self.waiting.pop(known[0])
        self.requests.append(replace(request, seed=seed))
        sampled: Int32 = completion.token_ids[request.start : request.end]
        stopped = int(sampled[-1]) in self._stops or len(sampled) < max_new_tokens
        return Completion(
            token_ids=sampled,
            logprobs=completion.logprobs[request.start : request.end],
            text="",
            finish_reason="stop" if stopped else "length",
            weight_versions=[(0, 0, len(sampled))],
        )


def _differs(where: str, expected: str, found: str) -> StageOutcome:
    detail = "episodes played again"
    return StageOutcome("episodes", "differs", detail, where, expected=expected, found=found)
