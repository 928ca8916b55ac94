"""The packed field of an answer: what is read from it, and what of it is refused with which reason."""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode

import numpy as np
import pytest
from openai_server import choice
from packed_samples import framed, packed

from inflight.arrays import Sets
from inflight.completions import NOT_FINITE, Rejected, RetryableFailure, Unpatched, parse_turn
from inflight.packed_logprobs import Drawn, unpack

FIELD = packed([4, 5, 6], [-1.0, -0.25, -2.5], [{7: -0.5, 8: -3.0}, {}, {9: -0.125}])


def drawn(field, requested):
    return unpack([b64decode(field)], requested)


def answered(**changes):
    return json.dumps({"choices": [choice("456", **changes)]}).encode()


def test_tokens_log_probabilities_and_sets():
    got = drawn(FIELD, 4)
    assert got.token_ids.tolist() == [4, 5, 6]
    assert got.logprobs.tolist() == [-1.0, -0.25, -2.5]
    assert got.kept == [[4, 7, 8], [5], [6, 9]]
    assert (got.token_ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)


def test_a_set_as_large_as_what_was_requested_may_be_larger():
    assert drawn(FIELD, 3).kept == [[], [5], [6, 9]]
    assert drawn(FIELD, 2).kept == [[], [5], []]


def test_without_sets_there_are_only_tokens():
    got = drawn(packed([4, 5], [-1.0, -2.0]), 0)
    assert (got.token_ids.tolist(), got.logprobs.tolist(), got.kept) == ([4, 5], [-1.0, -2.0], None)


@pytest.mark.parametrize("field", ["", framed([], [])])
def test_no_tokens(field):
    assert len(drawn(field, 0)) == 0
    assert drawn(field, 3).kept == []


def test_a_turn_has_the_very_numbers():
    turn = parse_turn(answered(packed_logprobs=FIELD), "g0", 4)
    assert turn.token_ids == [4, 5, 6]
    assert turn.logprobs == [-1.0, -0.25, -2.5]
    assert turn.kept == [[4, 7, 8], [5], [6, 9]]


def test_parts_are_joined_and_cut():
    parts = [drawn(FIELD, 4), drawn("", 4), drawn(packed([3], others=[{2: -1.0}]), 4)]
    whole = Drawn.joined(parts)
    assert whole.token_ids.tolist() == [4, 5, 6, 3]
    assert whole.logprobs.tolist() == [-1.0, -0.25, -2.5, -0.5]
    assert whole.kept == [[4, 7, 8], [5], [6, 9], [3, 2]]
    assert whole.first(2).token_ids.tolist() == [4, 5]
    assert whole.first(2).kept == [[4, 7, 8], [5]]
    assert whole.first(0).kept == Sets()


DAMAGED = {
    "not base64": ("??", "base64"),
    "no whole number": (b64encode(b"abcde").decode(), "5 bytes are no packed"),
    "more tokens than bytes": (framed([1], [(4, -1.0)], length=9), "of 9 tokens in 16 bytes"),
    "less than no tokens": (framed([1], [(4, -1.0)], length=-1), "of -1 tokens"),
    "more counts than entries": (framed([1, 3], [(4, -1.0), (5, -1.0)]), "2 packed .* where 4 of 2 tokens"),
    "fewer counts than entries": (framed([1], [(4, -1.0), (5, -1.0)]), "2 packed .* where 1 of 1 tokens"),
    "a token without itself": (framed([0, 2], [(4, -1.0), (5, -1.0)]), "0 to 2 packed"),
    "a negative count": (framed([-1, 3], [(4, -1.0), (5, -1.0)]), "-1 to 3 packed"),
    "a count that overflows": (framed([1 << 30, 1 << 30], [(4, -1.0), (5, -1.0)]), "1073741824 packed"),
    "more than requested": (framed([6], [(each, -1.0) for each in range(6)]), "6 to 6 packed .* 4 beside its own"),
    "fewer entries than tokens": (framed([1, 1], [(4, -1.0)]), "of 2 tokens in 20 bytes"),
    "entries without a token": (framed([], [(4, -1.0)]), "of 0 tokens in 12 bytes"),
    "a negative id": (packed([-4]), "-4 is no token id"),
    "cut off": (b64encode(b64decode(FIELD)[:-4]).decode(), "of 3 tokens in 60 bytes"),
}


@pytest.mark.parametrize(("field", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_field_is_refused_with_its_reason(field, reason):
    with pytest.raises(RetryableFailure, match=reason) as error:
        parse_turn(answered(packed_logprobs=field), "g0", 4)
    assert error.value.reason == "malformed answer"


def test_a_negative_id_is_found_at_once():
    """Not only where the whole turn is checked: what a generator sent before goes to the next one as a prompt."""
    with pytest.raises(ValueError, match="-4 is no token id"):
        drawn(packed([5, -4]), 0)
    with pytest.raises(ValueError, match="-3 is no token id"):
        drawn(packed([5], others=[{-3: -1.0}]), 2)


def test_fields_are_read_together_as_one_by_one():
    fields = [b64decode(each) for each in (FIELD, framed([], []), "", packed([3], others=[{2: -1.0}]), FIELD)]
    for requested in (2, 4):
        together, apart = unpack(fields, requested), Drawn.joined([unpack([each], requested) for each in fields])
        assert together.token_ids.tolist() == apart.token_ids.tolist() == [4, 5, 6, 3, 4, 5, 6]
        assert together.logprobs.tolist() == apart.logprobs.tolist()
        assert together.kept == apart.kept


def test_counts_of_one_field_are_not_made_up_for_by_another():
    one, other = framed([1], [(4, -1.0), (5, -1.0)]), framed([3], [(6, -1.0), (7, -1.0)])
    with pytest.raises(ValueError, match="2 packed log-probabilities where 1 of 1 tokens were announced"):
        unpack([b64decode(one), b64decode(other)], 4)


def test_a_field_that_does_not_fit_the_tags_is_refused():
    with pytest.raises(RetryableFailure, match="version spans"):
        parse_turn(answered(packed_logprobs=FIELD, token_versions=[[1, 0]]), "g0", 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_no_number_rejects_the_sample(value):
    with pytest.raises(Rejected, match="1 of 3 log-probabilities") as error:
        parse_turn(answered(packed_logprobs=packed([4, 5, 6], [-1.0, value, -1.0])), "g0", 4)
    assert error.value.reason == NOT_FINITE


def test_a_server_of_an_older_patch_is_named():
    with pytest.raises(Unpatched, match="g0 answers without packed_logprobs: its vLLM has an older patch"):
        parse_turn(answered(packed_logprobs=None), "g0", 4)
