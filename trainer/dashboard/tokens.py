"""Text of single tokens."""

import codecs
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import ServiceError

_FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


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
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}
        space = self._tokenizer.token_to_id("Ġ")
        self._byte_level = space is not None and self._tokenizer.decode([space]) == " "
        self._bytes = cache(self._read)

    @classmethod
    def of_run(cls, run_dir: Path) -> "TokenTexts":
        """Reads the run's tokenizer, from `model/` or from a checkpoint."""
        places = [run_dir / "model" / _FILE, *sorted(run_dir.glob(f"checkpoints/*/{_FILE}"))]
        return cls(next((path for path in places if path.is_file()), places[0]))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token's text; a character made of several tokens is in the text of the last
        one.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes(token)) for token in token_ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def special(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the positions of special tokens, such as the end of a turn."""
        return [place for place, token in enumerate(token_ids) if token in self._special]

    def _read(self, token: int) -> bytes:
        text = self._added.get(token) or self._tokenizer.id_to_token(token)
        if text is None:
            # A model may have more outputs than its tokenizer has tokens.
            return f"⟨{token}⟩".encode()
        if token in self._added:
            return str(text).encode()
        if self._byte_level and all(character in _ALPHABET for character in text):
            return bytes(_ALPHABET[character] for character in text)
        if match := _BYTE.fullmatch(text):
            return bytes.fromhex(match[1])
        return str(text).replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (GPT-2): itself when printable, the
    others follow from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for i, byte in enumerate(others):
        alphabet[chr(256 + i)] = byte
    return alphabet


_ALPHABET = _alphabet()
