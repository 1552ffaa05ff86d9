"""Whether the rewards of a run say which answers are right: decided once, at the start, so that
reports show an accuracy in every line or in none.
"""

from collections.abc import Iterable

from trainer.rollouts.services import Services


class Verdicts:
    """The decision of one run; `None`: the first graded answers decide, because nobody can know
    whether an environment's programs give rewards of their own.
    """

    def __init__(self, decided: bool | None) -> None:
        self.decided = decided

    def of(self, verified: Iterable[bool]) -> bool:
        """Returns the decision. Where only answers can tell, the first call decides: `verified`
        says for every answer whether a verdict came with it.
        """
        if self.decided is None:
            self.decided = all(verified)
        return self.decided

    def __str__(self) -> str:
        if self.decided is None:
            return "whether the rewards are verdicts (right or wrong), the first answers tell"
        if self.decided:
            return "the rewards are verdicts: accuracy is the share of right answers"
        return (
            "the rewards are not verdicts (right or wrong): reports show their mean. Functions and "
            "environments that return 1 or 0 declare it with gives_verdicts = True"
        )


async def verdicts_of(services: Services, recorded: bool | None = None) -> Verdicts:
    """Returns the decision of a run from what its reward functions and its environment declare.

    `recorded` is that of an earlier attempt of the run, which counts if only answers could tell.
    """
    from_functions = await services.reward.gives_verdicts()
    if services.environment is None:
        return Verdicts(from_functions)

    has_reward, gives_verdicts = await services.environment.rewards()
    services.environment_gives_verdicts = gives_verdicts
    if has_reward is None:
        return Verdicts(recorded)
    return Verdicts(gives_verdicts if has_reward else from_functions)
