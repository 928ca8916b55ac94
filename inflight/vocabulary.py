"""Ids without a token in the tokenizer: a model's vocabulary is often padded beyond its tokenizer's, and a padded id
has a logit like any other, so it gets sampled. It stands for no text."""

from __future__ import annotations

from typing import Any


def decode_every_id(tokenizer: Any) -> None:
    """Makes a tokenizer of transformers decode any id: an id that has no token becomes "".

    Otherwise the result depends on the kind of tokenizer: the id is omitted, is None where text is expected, or raises.
    Changes the object's `decode` and `convert_ids_to_tokens` only.
    """
    known = frozenset(tokenizer.get_vocab().values())
    decode = tokenizer.decode
    convert = tokenizer.convert_ids_to_tokens

    def decode_known(token_ids: Any, *args: Any, **settings: Any) -> Any:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return decode([each for each in ids if each in known], *args, **settings)

    def convert_known(ids: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(ids, int):
            return convert(ids, *args, **settings) if ids in known else ""
        return [
            piece for each in ids for piece in (convert([each], *args, **settings) if each in known else [""])
        ]  # one by one: special tokens may be skipped

    tokenizer.decode = decode_known
    tokenizer.convert_ids_to_tokens = convert_known
