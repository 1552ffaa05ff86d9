"""Makes a graded group of a prompt: completions or episodes, rewards, the teacher's scores."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from common.errors import ServiceError, ServiceLost
from common.wire.schemas import Completion, Episode, EpisodeRequest, Group, Prompt
from trainer.algorithms.spool import EXPERTS, split_routing, spool
from trainer.rollouts.drops import Drops, GroupFailed
from trainer.rollouts.engine_room import EngineRoom
from trainer.rollouts.episodes import (
    PLAYED,
    answer_of,
    completions_of,
    episode_request,
    play,
    replacing_seed,
)
from trainer.rollouts.prompt_cursor import DrawnPrompt
from trainer.rollouts.request_batcher import RequestBatcher
from trainer.rollouts.requests import reward_items, sampling_seed
from trainer.rollouts.services import RolloutContext

_MAX_GRADE = 1024
"""Maximum number of answers in one call to the reward-server, unless one group has more: JSON
bodies are limited."""


class GroupMaker:
    """Makes groups, any number at once, in the event loop of the clients."""

    def __init__(self, context: RolloutContext, drops: Drops) -> None:
        self._config = context.config
        self._services = context.services
        self._prompter = context.prompter
        self._clock = context.clock
        self._drops = drops
        self._engines = EngineRoom(context.services.rollout.engines)
        self._grade_batched = RequestBatcher(
            context.services.reward.grade_all,
            _MAX_GRADE,
            len,
            may_follow=partial(self._clock.is_active, "generation"),
        )

    def empty(self, drawn: DrawnPrompt, prompt_ids: list[int], group_id: str) -> Group:
        """Returns the group of a prompt before it has completions."""
        prompt = drawn.prompt
        group = Group(
            id=group_id,
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_token_ids=np.array(prompt_ids, np.int32),
            completions=[],
            epoch=drawn.epoch,
            position=drawn.position,
        )
        sampling = self._config.sampling
        if sampling.min_new_tokens and not sampling.truncation():
            group.min_new_tokens = sampling.min_new_tokens
            group.barred = np.array(self._prompter.stop_token_ids, np.int32)
        return group

    async def fill(self, group: Group, prompt: Prompt, answer_start: str) -> None:
        """Fills a group with graded completions, whose texts begin with `answer_start`.

        Raises GroupFailed when one is missing or has no reward, ServiceLost when a service will
        never answer again.
        """
        if self._services.environment is None:
            await self._complete(prompt, group, answer_start)
        else:
            await self._play(prompt, group)
        group.created_at = time.time()

    async def _complete(self, prompt: Prompt, group: Group, answer_start: str) -> None:
        """Fills a group with single completions, their rewards and the teacher's scores."""
        sampling = self._config.sampling
        prompt_ids = group.prompt_token_ids.tolist()
        with self._failing("generation", stage="generation"):
            async with self._engines.enter(sampling.group_size):
                group.completions = await self._services.rollout.generate(
                    prompt_ids,
                    n=sampling.group_size,
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    stop_token_ids=self._prompter.stop_token_ids,
                    sampling_seed=sampling_seed(self._config.seed, group.position),
                    parameters=sampling.training_truncation() | sampling.stop_conditions(),
                    routed_experts=self._config.trainer.routing_replay,
                )
        if self._config.trainer.routing_replay:
            # It copies gigabytes and writes a file: the event loop must not wait for that.
            await asyncio.to_thread(self._keep_experts, group)
        for completion in group.completions:
            completion.text = answer_start + completion.text
        await self._grade(prompt, group.completions)

        teacher = self._services.teacher
        if teacher is None:
            return
        tokens = [completion.token_ids for completion in group.completions]
        with self._failing("teacher", stage="reward"):
            scores = await teacher.score(prompt_ids, tokens)
        for completion, logprobs in zip(group.completions, scores, strict=True):
            completion.teacher_logprobs = logprobs

    def _keep_experts(self, group: Group) -> None:
        split_routing(group)
        spool(group, self._config.state_dir / EXPERTS)

    async def _play(self, prompt: Prompt, group: Group) -> None:
        """Fills a group with the whole episodes of its prompt.

        A lost or failed episode has no reward. With fewer than `environment.min_episodes` whole
        ones, others are played in place of the lost ones, once. If that does not suffice, or if all
        are lost, the group fails. How many are whole decides, never their rewards: the choice does
        not favour some answers over others.
        """
        request = episode_request(
            self._config,
            prompt,
            request_id=group.id,
            n=self._config.sampling.group_size,
            position=group.position,
        )
        fewest = self._config.environment.min_episodes or request.n
        episodes, lost = await self._episodes(request)
        # If all are lost, playing them again would meet the same fault.
        if episodes and len(episodes) < fewest:
            again = request.model_copy(deep=True)
            again.request_id = f"{group.id}-again"
            again.n = len(lost)
            again.task.seed = replacing_seed(request.task.seed, group.position)
            others, lost = await self._episodes(again)
            episodes += others
        if len(episodes) < fewest:
            raise GroupFailed("episode", lost[0])

        group.lost_episodes = lost
        played = [episode.id for episode in episodes]
        if played != [f"{group.id}-{number}" for number in range(request.n)]:
            group.metadata[PLAYED] = played
        gives_verdicts = self._services.environment_gives_verdicts
        answers = [answer_of(episode, gives_verdicts) for episode in episodes]
        ungraded: list[Completion] = []
        for answer, episode in zip(answers, episodes, strict=True):
            if episode.reward is None:
                ungraded.append(answer)
        await self._grade(prompt, ungraded)

        group.prompt_token_ids = episodes[0].sequences[0].prompt_ids
        for number, (episode, answer) in enumerate(zip(episodes, answers, strict=True)):
            group.completions += completions_of(episode, answer, number)

    async def _episodes(self, request: EpisodeRequest) -> tuple[list[Episode], list[str]]:
        """Plays the episodes of a request; returns the whole ones, and why the others were lost.

        Raises GroupFailed or ServiceLost.
        """
        with self._failing("generation", stage="generation"):
            async with self._engines.enter(request.n):
                episodes = await play(self._services, request)
        self._drops.add_episodes(episodes)
        whole: list[Episode] = []
        lost: list[str] = []
        for episode in episodes:
            if episode.status == "ok":
                whole.append(episode)
            else:
                lost.append(f"{episode.status}: {episode.detail or episode.stop_reason}")
        return whole, lost

    async def _grade(self, prompt: Prompt, completions: list[Completion]) -> None:
        if not completions:
            return
        for completion in completions:
            completion.reward = math.nan  # an error is not a zero, also in the log of the group
        items = reward_items(prompt, completions, self._services.reward.gets_tokens)
        with self._failing("reward", stage="reward"):
            results = await self._grade_batched(items)
        for completion, result in zip(completions, results, strict=True):
            completion.reward = math.nan if result.reward is None else result.reward
            completion.correct = result.correct
            completion.status = result.status
            completion.extracted_answer = result.extracted_answer
            completion.verified = result.verified
            completion.components = result.components

        for result in results:
            if result.reward is None:
                reason = result.reason or result.status
                raise GroupFailed("reward", f"an answer could not be graded: {reason}")

    @contextmanager
    def _failing(self, reason: str, *, stage: str) -> Iterator[None]:
        """Counts the block's time for a stage. Raises GroupFailed for an error of a service."""
        try:
            with self._clock.stage(stage):
                yield
        except ServiceLost:
            raise
        except ServiceError as error:
            raise GroupFailed(reason, str(error)) from error
