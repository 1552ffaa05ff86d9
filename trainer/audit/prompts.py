"""Draws the prompts of a step again: their rows, their order and their tokens."""

from collections.abc import Iterator, Mapping

from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from common.wire.schemas import Group, Prompt
from services.data.loaders import load_split
from services.data.stream import permutation
from trainer.audit.comparison import StageOutcome
from trainer.audit.recorded import RecordedStep
from trainer.observe.problems import kept_problems
from trainer.observe.run_dir import PROBLEMS
from trainer.policy.scorer import load_tokenizer


def load_rows(recorded: RecordedStep, config: Config) -> dict[str, Prompt]:
    """Returns the rows of the training split by id, in their order; none when a program gave them
    and an earlier version did not keep them. Raises ConfigError when the data set does not load.
    """
    if "prompts" in recorded.start.given:
        assert config.trainer.run_dir is not None, "`config_of` sets it"
        kept = kept_problems(config.trainer.run_dir)
        rows = kept.train if kept else []
    else:
        rows = load_split(config.data, "train", config.seed)
    return {row.id: row for row in rows}


def compare_prompts(
    recorded: RecordedStep, config: Config, rows: Mapping[str, Prompt]
) -> StageOutcome:
    """Compares the prompts of a step with the rows of the data set at their positions."""
    ids = list(rows)
    if not ids:
        return StageOutcome("prompts", "not compared", "a program gave them; they were not kept")

    prompter = Prompter(load_tokenizer(config.model), PromptStyle.of(config), [])
    has_order = config.data.curriculum == "none"
    source = PROBLEMS if "prompts" in recorded.start.given else config.data.source
    detail = f"{len(recorded.fresh)} prompts of {source}: rows"
    detail += ", order and tokens" if has_order else " and tokens (a curriculum chose the order)"
    for group in recorded.fresh:
        drawn = ""
        if has_order:
            epoch, place = divmod(group.position, len(ids))
            drawn = ids[permutation(config.seed, epoch, len(ids))[place]]
        for where, expected, found in _differences(
            group, rows, drawn=drawn, prompter=prompter, config=config
        ):
            return StageOutcome("prompts", "differs", detail, where, expected=expected, found=found)
    return StageOutcome("prompts", "equal", detail)


def _differences(
    group: Group, rows: Mapping[str, Prompt], *, drawn: str, prompter: Prompter, config: Config
) -> Iterator[tuple[str, str, str]]:
    """Yields where the prompt of a group differs from the row `drawn` at its position, what was
    recorded and what was found.
    """
    where = f"group {group.id}, position {group.position}"
    row = rows.get(group.prompt_id)
    if row is None:
        yield where, f"row {group.prompt_id}", "no such row"
        return
    # A curriculum has no order that could be computed here.
    if drawn not in ("", group.prompt_id):
        yield where, f"row {group.prompt_id}", f"row {drawn}"
    for what in ("prompt", "ground_truth"):
        was = getattr(group, what)
        is_now = getattr(row, what)
        if was != is_now:
            yield f"{where}, {what}", repr(was), repr(is_now)
    if config.environment.name:
        return  # the environment makes the first messages
    recorded = group.prompt_token_ids.tolist()
    tokens = list(prompter.token_ids(row))
    if tokens != recorded:
        yield f"{where}, tokens", str(recorded), str(tokens)
