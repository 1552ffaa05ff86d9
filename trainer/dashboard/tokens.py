"""Text of single tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ServiceError

_FILE = "tokenizer.json"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts of the tokens of a `tokenizer.json`. Raises ServiceError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            # Slow to import, and only the detail of a group needs it.
            from tokenizers import Tokenizer

            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ServiceError(
                f"the tokenizer cannot be read: {error}", field="trainer.run_dir", value=str(path)
            ) from None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}

    @classmethod
    def of_run(cls, run_dir: Path) -> "TokenTexts":
        """Reads the run's tokenizer, from `model/` or from a checkpoint."""
        places = [run_dir / "model" / _FILE, *sorted(run_dir.glob(f"checkpoints/*/{_FILE}"))]
        return cls(next((path for path in places if path.is_file()), places[0]))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token's text. The text of a character of several tokens is at the last of
        them, and the others have none: `["H", "", "é"]`.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        texts = []
        for token in token_ids:
            if self._tokenizer.id_to_token(token) is None:
                # A model may have more outputs than its tokenizer has tokens.
                texts.append(f"⟨{token}⟩")
            else:
                texts.append(stream.step(self._tokenizer, token) or "")
        # The stream holds back the beginning of a character whose other tokens do not follow.
        whole = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if whole.endswith(_INCOMPLETE):
            texts[-1] += _INCOMPLETE
        return texts

    def special(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the positions of special tokens, such as the end of a turn."""
        return [place for place, token in enumerate(token_ids) if token in self._special]
