"""Requests episodes from the environment-server, and turns them into completions of a group."""

from itertools import chain

from msgspec.structs import replace

from common.prompts.prompter import conversation
from common.settings.config import Config
from common.wire.schemas import (
    Completion,
    Episode,
    EpisodeLimits,
    EpisodePolicy,
    EpisodeRequest,
    EpisodeSampling,
    EpisodeTask,
    Prompt,
)
from trainer.rollouts.requests import sampling_seed
from trainer.rollouts.services import Services

TOOL_CALLS_PER_TURN = 8
"""Tool calls of an episode, as a multiple of `environment.turns`."""

PLAYED = "episodes"
"""Key of `Group.metadata`: the ids of a group's episodes, where some were lost, replaced or tried
again. What they sampled depends on it."""


def replacing_seed(seed: int, position: int) -> int:
    """Returns the seed of the task whose episodes replace the lost ones of a task with `seed`."""
    return sampling_seed(seed, position)


def episode_request(
    config: Config,
    prompt: Prompt,
    *,
    request_id: str,
    n: int,
    position: int,
    temperature: float | None = None,
) -> EpisodeRequest:
    """Returns the request for n episodes of a problem, at the run's temperature or another one."""
    settings = config.environment
    sampling = config.sampling
    context = settings.context
    if config.rollout.engine == "embedded":
        context = min(context, config.rollout.max_context_tokens)
    messages = conversation(prompt, sampling.system_prompt, prompt.prompt)
    return EpisodeRequest(
        request_id=request_id,
        n=n,
        task=EpisodeTask(
            env=settings.name,
            prompt=prompt.prompt,
            messages=[dict(message) for message in messages],
            ground_truth=prompt.ground_truth,
            columns=prompt.columns,
            seed=sampling_seed(config.seed, position),
        ),
        sampling=EpisodeSampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature if temperature is None else temperature,
        ),
        limits=EpisodeLimits(
            turns=settings.turns,
            sampled_tokens=settings.turns * sampling.max_new_tokens,
            context=context,
            tool_calls=settings.turns * TOOL_CALLS_PER_TURN,
            deadline_s=settings.deadline_s,
            tool_timeout_s=settings.tool_timeout_s,
        ),
    )


async def play(services: Services, request: EpisodeRequest) -> list[Episode]:
    """Returns the episodes of a request, sampled from the policy that the engines serve now. Raises
    ServiceError.
    """
    assert services.environment is not None
    adapter, version = services.rollout.adapter or ("", 0)
    request.policy = EpisodePolicy(adapter=adapter, version=version)
    return await services.environment.episodes(request)


def answer_of(episode: Episode, gives_verdicts: bool) -> Completion:
    """Returns an episode's last answer as a completion, with the episode's reward; without one it
    must be graded. `gives_verdicts`: whether the environment's rewards say what is right.
    """
    last = episode.sequences[-1]
    answer = Completion(
        token_ids=last.token_ids,
        logprobs=last.logprobs,
        text=episode.answer,
        finish_reason=last.finish_reason,
        weight_versions=last.weight_versions,
    )
    if episode.reward is not None:
        answer.reward = episode.reward
        answer.correct = gives_verdicts and episode.reward == 1
        answer.verified = gives_verdicts
        answer.components = episode.components
        answer.extracted_answer = episode.answer
    return answer


def completions_of(episode: Episode, answer: Completion, number: int) -> list[Completion]:
    """Returns a completion for each sequence of an episode, with the reward and the grade of its
    `answer`.
    """
    reward = answer.reward
    if episode.reward is None:  # the run's reward functions graded it, and do not see its turns
        turns = chain.from_iterable(sequence.turns for sequence in episode.sequences)
        reward += sum(turn.reward or 0.0 for turn in turns)
    return [
        replace(
            answer,
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            text=sequence.text,
            finish_reason=sequence.finish_reason,
            weight_versions=sequence.weight_versions,
            reward=reward,
            mask=sequence.mask,
            prompt_ids=sequence.prompt_ids,
            turns=sequence.turns,
            episode=number,
        )
        for sequence in episode.sequences
    ]
