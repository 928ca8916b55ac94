"""What is left to ask of a sequence, and where a stop string across the seam ends it."""

from __future__ import annotations

import asyncio

import pytest

from inflight.actor.continuation import StartAnew, crossing_stop, rest_of
from inflight.completions import sampling
from inflight.config import RolloutConfig

REQUEST = {"prompt": [1, 2], "max_tokens": 9, "seed": 7}


def test_nothing_produced_is_the_request_itself():
    request = REQUEST | {"presence_penalty": 1.0, "response_format": {"type": "json_object"}}
    assert rest_of(request, []) is request


def test_what_is_left_to_ask():
    rest = rest_of(REQUEST | {"min_tokens": 4, "stop": ["x"]}, [5, 6, 6])
    seed = rest.pop("seed")
    assert rest == {"prompt": [1, 2, 5, 6, 6], "max_tokens": 6, "min_tokens": 1, "stop": ["x"]}
    assert rest_of(REQUEST | {"min_tokens": 2}, [5, 6, 6])["min_tokens"] == 0
    assert seed != 7, "the first draws of the old seed made the tokens that are there"
    assert seed != rest_of(REQUEST, [5, 6])["seed"]
    assert seed == rest_of(REQUEST, [1, 1, 1])["seed"]
    assert 0 <= seed < 1 << 63


def test_all_that_the_actor_asks_can_be_continued():
    """But for the penalties that count what the completion holds."""
    config = RolloutConfig(top_p=0.9, top_k=5, min_p=0.1, temperature=0.7, repetition_penalty=1.2)
    request = sampling(config, 50) | {"prompt": [1], "seed": 3, "stream": True}
    assert rest_of(request, [4]) == request | {
        "prompt": [1, 4],
        "max_tokens": request["max_tokens"] - 1,
        "seed": rest_of(request, [4])["seed"],
    }


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"bad_words": ["no"]},
        {"something": "new in vLLM"},
        {"max_tokens": 3},
    ],
)
def test_a_sequence_that_can_not_be_continued_exactly_is_restarted(field):
    with pytest.raises(StartAnew, match=next(iter(field))):
        rest_of(REQUEST | field, [5, 6, 6])


@pytest.mark.parametrize(
    ("before", "after", "stops", "end"),
    [
        ("xa", "bc", ["ab"], 3),
        ("xa", "bc", ["abc"], 4),
        ("xab", "c", ["abc"], 4),
        ("x\n", "\n", ["\n\n"], 3),
        ("xa", "ab", ["ab"], None),  # the generator sees this one itself
        ("xa", "cb", ["ab"], None),
        ("", "ab", ["ab"], None),
        ("xa", "bab", ["ba", "ab"], 3),
        ("aaaaa", "b", ["c"], None),
        ("xa", "bc", [], None),
        ("ab", "abab", ["baba"], 5),
    ],
)
def test_a_stop_string_across_the_seam(before, after, stops, end):
    ids = [ord(letter) for letter in before + after]

    async def decode(some):
        return "".join(map(chr, some))

    assert asyncio.run(crossing_stop(decode, ids, len(before), stops)) == end


def test_what_was_searched_for_a_stop_string_is_not_decoded_again():
    ids = [ord(letter) for letter in "xa" + "bcdefgh"]
    decoded = []

    async def decode(some):
        decoded.append(len(some))
        return "".join(map(chr, some))

    async def stream():
        for length in range(3, len(ids) + 1):
            assert await crossing_stop(decode, ids[:length], 2, ["abcx"], searched=length - 1) is None

    asyncio.run(stream())
    assert decoded == [2, 3, 2, 4, 2, 5, 2, 6]
