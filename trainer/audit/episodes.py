"""Plays the episodes of a step again, with the recorded answers in the place of an engine.

The environment runs again: its first messages, its tools and its rewards are compared with what the
run recorded. What the model read before each answer, and the seed of that answer, then say how an
engine can sample it again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError, ServiceError
from common.settings.config import Config
from common.wire.schemas import Completion, Group, Int32, Prompt
from services.environment.outcome import EpisodeRunner
from services.environment.outcome import Outcome as EpisodeOutcome
from services.environment.runners import load_runner, needs_gateway
from services.environment.service import session_seed
from services.environment.session import Session
from services.environment.template import Template
from trainer.audit.comparison import StageOutcome
from trainer.audit.completions import Request
from trainer.audit.grading import GradedAnswer, answer_of_episode, row_of
from trainer.audit.recorded import RecordedStep
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.episodes import episode_request


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
    reason = _why_not(recorded, config)
    if not reason:
        try:
            tokenizer = load_tokenizer(config.model)
            template = Template(tokenizer, list(stops), config.sampling.chat_template_kwargs)
            runner = load_runner(config.environment, "", config.runtime)
        except ConfigError as error:
            reason = f"the environment does not load: {error}"
    if reason:
        return PlayedAgain(StageOutcome("episodes", "not compared", reason))
    player = _Player(recorded, config, rows, template=template, runner=runner, stops=stops)
    return asyncio.run(player.play())


def _why_not(recorded: RecordedStep, config: Config) -> str:
    if "environment" in recorded.start.given:
        return "the caller of the Python API gave the environment"
    if "prompts" in recorded.start.given:
        return "the caller of the Python API gave the prompts, whose columns the environment reads"
    if needs_gateway(config.environment):
        return f"programs play the episodes ({config.environment.name})"
    return ""


@dataclass(frozen=True)
class _Row:
    """A recorded sequence of an episode."""

    index: int
    """In the batch."""
    completion: Completion


@dataclass(frozen=True)
class _Answer:
    """A recorded answer of the model."""

    row: _Row
    before: list[int]
    """The tokens that the model read."""
    start: int
    end: int
    """Its place in the completion."""


class _Player:
    def __init__(
        self,
        recorded: RecordedStep,
        config: Config,
        rows: Mapping[str, Prompt],
        *,
        template: Template,
        runner: EpisodeRunner,
        stops: Sequence[int],
    ) -> None:
        self._recorded = recorded
        self._config = config
        self._rows = rows
        self._template = template
        self._runner = runner
        self._stops = stops
        self._played = PlayedAgain(StageOutcome("episodes", "equal", ""))

    async def play(self) -> PlayedAgain:
        """Returns what came of it; stops at the first episode that is another one."""
        count = 0
        skipped = 0
        first = 0
        for item in self._recorded.groups:
            group = item.group
            if item.reused or group.lost_episodes:
                skipped += not item.reused
            else:
                episodes = _episodes(group, first)
                for number, rows in enumerate(episodes):
                    count += 1
                    difference = await self._play(group, number, rows)
                    if difference is not None:
                        self._played.outcome = difference
                        await self._runner.close()
                        return self._played
            first += len(group.completions)
        await self._runner.close()
        detail = f"{count} episodes of {self._config.environment.name} played again"
        if skipped:
            detail += f"; {skipped} groups lost episodes and have no numbers, they were left out"
        self._played.outcome = StageOutcome("episodes", "equal", detail)
        return self._played

    async def _play(self, group: Group, number: int, rows: list[_Row]) -> StageOutcome | None:
        """Plays one episode; returns the outcome if it is another one."""
        name = f"episode {number} of group {group.id}"
        config = self._config
        row = row_of(group, self._rows)
        request = episode_request(
            config,
            row,
            request_id=group.id,
            n=config.sampling.group_size,
            position=group.position,
        )
        answers = _RecordedAnswers(rows, self._stops)
        session = Session(
            name,
            self._template,
            answers.sample,
            limits=request.limits,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=session_seed(request.task.seed, number, attempt=0),
        )
        outcome = await self._runner.run(request.task, session, request.limits)
        session.close()

        self._played.requests += answers.requests
        if answers.unknown is not None:
            return self._other_messages(name, answers, answers.unknown)
        if outcome.status != "ok":
            return _differs(name, "an episode that ends", f"{outcome.status}: {outcome.detail}")
        if answers.left:
            total = len(answers.requests) + answers.left
            found = f"the end, after {len(answers.requests)} answers"
            return _differs(name, f"{total} answers of the model", found)
        self._compare_reward(name, rows, outcome, row)
        return None

    def _other_messages(
        self, name: str, answers: "_RecordedAnswers", tokens: Sequence[int]
    ) -> StageOutcome:
        """Returns the outcome for a call whose messages are not the recorded ones."""
        expected = answers.expected()
        at = 0
        while at < min(len(expected), len(tokens)) and expected[at] == tokens[at]:
            at += 1
        where = f"{name}, before answer {len(answers.requests)}, token {at}"
        return _differs(
            where,
            f"the environment's text {self._template.text(list(expected[at:]))!r}",
            repr(self._template.text(list(tokens[at:]))),
        )

    def _compare_reward(
        self, name: str, rows: list[_Row], outcome: EpisodeOutcome, prompt: Prompt
    ) -> None:
        recorded = rows[0].completion
        turns = [turn.reward or 0.0 for row in rows for turn in row.completion.turns]
        again = outcome.turn_rewards or [0.0] * len(turns)
        if outcome.reward is None:
            last = rows[-1].completion
            graded = answer_of_episode(name, prompt, outcome.answer, last, of_turns=sum(turns))
            self._played.answers.append(graded)
            return
        self._played.given += 1
        same = outcome.reward == recorded.reward and outcome.components == recorded.components
        if (same and turns == again) or self._played.wrong_reward is not None:
            return
        self._played.wrong_reward = StageOutcome(
            "rewards",
            "differs",
            f"rewards given again by {self._config.environment.name}",
            name,
            expected=f"{recorded.reward!r} ({recorded.components}), turns {turns}",
            found=f"{outcome.reward!r} ({outcome.components}), turns {again}",
        )


class _RecordedAnswers:
    """Answers the calls of one episode with what the run recorded."""

    def __init__(self, rows: Sequence[_Row], stops: Sequence[int]) -> None:
        self._stops = set(stops)
        self._waiting: list[_Answer] = []
        """Answers that were not asked for yet."""
        for row in rows:
            completion = row.completion
            assert completion.prompt_ids is not None, "a sequence of an episode has its own prompt"
            tokens = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
            offset = len(completion.prompt_ids)
            for turn in completion.turns:
                before = tokens[: offset + turn.start]
                self._waiting.append(_Answer(row, before, turn.start, turn.end))
        self.requests: list[Request] = []
        self.unknown: Sequence[int] | None = None
        """The tokens of a call that the run did not make."""

    @property
    def left(self) -> int:
        """How many answers were not asked for."""
        return len(self._waiting)

    def expected(self) -> Sequence[int]:
        """Returns the tokens of the next call that the run made; none when it made no other."""
        return self._waiting[0].before if self._waiting else []

    async def sample(
        self, tokens: Int32, max_new_tokens: int, seed: int, stop: Sequence[str]
    ) -> Completion:
        """See `services.environment.session.Sample`. Raises ServiceError for another call than the
        run made.
        """
        asked = tokens.tolist()
        known = [answer for answer in self._waiting if answer.before == asked]
        if not known or self.unknown is not None:
            self.unknown = self.unknown or asked
            raise ServiceError("the run made no such call")
        answer = known[0]
        self._waiting = [each for each in self._waiting if each is not answer]
        request = Request(
            row=answer.row.index,
            prompt=answer.before,
            seed=seed,
            start=answer.start,
            end=answer.end,
        )
        self.requests.append(request)
        completion = answer.row.completion
        sampled: Int32 = completion.token_ids[answer.start : answer.end]
        stopped = int(sampled[-1]) in self._stops or len(sampled) < max_new_tokens
        return Completion(
            token_ids=sampled,
            logprobs=completion.logprobs[answer.start : answer.end],
            text="",
            finish_reason="stop" if stopped else "length",
            weight_versions=[(0, 0, len(sampled))],
        )


def _episodes(group: Group, first: int) -> list[list[_Row]]:
    """Returns the rows of each episode of a group, whose first row is `first`."""
    found: dict[int, list[_Row]] = {}
    for index, completion in enumerate(group.completions, first):
        found.setdefault(completion.episode or 0, []).append(_Row(index, completion))
    return [found[number] for number in sorted(found)]


def _differs(where: str, expected: str, found: str) -> StageOutcome:
    detail = "episodes played again"
    return StageOutcome("episodes", "differs", detail, where, expected=expected, found=found)
