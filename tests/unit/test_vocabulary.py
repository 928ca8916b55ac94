"""Ids beyond a tokenizer, which a padded model samples."""

import pytest
from padded_models import metaspace
from transformers import EsmTokenizer

from inflight.models import prepare
from inflight.vocabulary import decode_every_id


class Strict(EsmTokenizer):
    """A tokenizer in Python that raises for an id that it does not know, as SentencePiece's do."""

    def _convert_id_to_token(self, index):
        return self.get_vocab_list()[index]

    def get_vocab_list(self):
        return sorted(self.get_vocab(), key=self.get_vocab().__getitem__)


@pytest.fixture(params=["metaspace", "words", "python"])
def tokenizer(request, tmp_path):
    if request.param == "metaspace":
        found, text = metaspace(), "1+2"
    elif request.param == "words":
        from transformers import AutoTokenizer

        found, text = AutoTokenizer.from_pretrained(prepare("tiny")), "1+2"
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", "1", "+", "2"]))
        found, text = Strict(str(tmp_path / "vocab.txt")), "1 + 2"
    found.text = text
    return found


def test_an_id_without_a_piece_is_no_text(tokenizer):
    ids = tokenizer(tokenizer.text, add_special_tokens=False)["input_ids"]
    whole, pieces = tokenizer.decode(ids), tokenizer.convert_ids_to_tokens(ids)
    decode_every_id(tokenizer)
    assert tokenizer.decode([60]) == ""
    assert tokenizer.decode(60) == ""
    assert tokenizer.decode([ids[0], 60, *ids[1:], 61], skip_special_tokens=True) == whole
    assert tokenizer.convert_ids_to_tokens(60) == ""
    assert tokenizer.convert_ids_to_tokens([ids[0], 60, *ids[1:]]) == [pieces[0], "", *pieces[1:]]
    assert tokenizer.decode(ids) == whole
    assert tokenizer.convert_ids_to_tokens(ids[0]) == pieces[0]
