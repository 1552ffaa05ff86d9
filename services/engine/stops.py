"""Text of completions, and stop strings in it."""

from typing import Any

from services.engine.jobs import Sequence


def matched_stop(tokenizer: Any, sequence: Sequence) -> str | None:
    """The stop string that the newest tokens completed, if any."""
    sampling = sequence.job.sampling
    if not sampling.stop:
        return None
    # A character has at most four bytes, a token at least one: older tokens cannot be part of a new match.
    reach = 4 * max(len(stop) for stop in sampling.stop) + 1
    tail = tokenizer.decode(sequence.tokens[-reach:], skip_special_tokens=sampling.skip_special_tokens)
    found = [(tail.find(stop), stop) for stop in sampling.stop if stop in tail]
    return min(found)[1] if found else None


def texts(tokenizer: Any, sequences: list[Sequence]) -> list[str]:
    """The text of each sequence: without its stop token, and up to its stop string, unless the stop is to be kept."""
    kept = []
    for sequence in sequences:
        matched = (sequence.finish or {}).get("matched")
        cut = isinstance(matched, int) and not sequence.job.sampling.keep_stop
        kept.append(sequence.tokens[:-1] if cut else sequence.tokens)
    skip = sequences[0].job.sampling.skip_special_tokens
    decoded = tokenizer.batch_decode(kept, skip_special_tokens=skip)
    return [_trim(text, sequence) for text, sequence in zip(decoded, sequences, strict=True)]


def _trim(text: str, sequence: Sequence) -> str:
    matched = (sequence.finish or {}).get("matched")
    if not isinstance(matched, str) or sequence.job.sampling.keep_stop or matched not in text:
        return text
    return text[: text.index(matched)]
