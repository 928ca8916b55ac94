"""The text of each token of a sequence, by the tokenizer of the run's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Decodes token by token, so that each has the text that it adds to those before it.

    Special tokens are shown. A character that several tokens make up is the text of the last of them; the others, and
    ids that the tokenizer does not know, have the text "".
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises OSError when the model's tokenizer is not there, ValueError when it can't be read."""
        path = model_dir / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises Exception itself
            raise ValueError(f"{path} can't be read: {error}") from None

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """[T] the text that each token adds; together they are the text of the sequence."""
        stream = DecodeStream(skip_special_tokens=False)
        texts = list[str]()
        try:
            for token_id in token_ids:
                texts.append(stream.step(self._tokenizer, token_id) or "")
        except Exception:  # noqa: BLE001 - of the library, for a sequence whose text changes with what follows
            return [self._tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]
        return texts
