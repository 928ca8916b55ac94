"""Tags of a sequence that several generators made, and the forward passes that they claim."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest
from openai_server import Tokens, chunk
from packed_samples import packed
from rollout_samples import make_rollout

from inflight.actor.sequence import READ_AT_ONCE, Sequence
from inflight.audit.segments import UNKNOWN, Segment, segments
from inflight.completions import Choice, Rejected, RetryableFailure, Unpatched
from inflight.types import GeneratorSpan, PrefillSpan, VersionSpan

PROMPT = [1, 2, 3]


def parsed(*args, **kwargs):
    return choice_of(chunk(*args, **kwargs))


def choice_of(fields):
    return msgspec.json.decode(msgspec.json.encode(fields), type=Choice)


def started(*pieces, prompt=PROMPT, most=64):
    """A sequence of the given pieces, each a list of chunks; all but the last one's generators are lost."""
    sequence = Sequence(len(prompt), most)
    for number, chunks in enumerate(pieces):
        if number:
            sequence.lose()
        sequence.begin(f"g{number}")
        for each in chunks:
            sequence.add(each)
    return sequence


def claims(turn, prompt=PROMPT):
    return segments(msgspec.structs.replace(make_rollout(), prompt_ids=prompt, turn=turn))


def test_a_stream_is_the_whole_answer():
    turn = started([parsed("0"), parsed("12", 1, version=1), parsed("3", 3, version=1, finish="length")]).turn()
    assert Tokens().decode(turn.token_ids) == "0123"
    assert turn.logprobs == [-0.5] * 4
    assert turn.token_versions == [VersionSpan(0, 0), VersionSpan(1, 1)]
    assert turn.prefill_versions == [PrefillSpan(0, 0, 1)]
    assert turn.finish_reason == "length"


def test_the_second_generator_says_what_it_computed_and_of_the_lost_one_only_what_is_certain_is_claimed():
    sequence = started([parsed("01", version=4), parsed("23", 2, version=5)], [parsed("45", version=3, finish="stop")])
    turn = sequence.turn()
    assert turn.token_versions == [VersionSpan(0, 4), VersionSpan(2, 5), VersionSpan(4, 3)]
    assert turn.prefill_versions == [
        PrefillSpan(0, 0, UNKNOWN),
        PrefillSpan(0, 2, 4),  # the position before a token is computed by the step that samples it
        PrefillSpan(2, 0, UNKNOWN),  # a preemption may have had the later version compute all of it anew
        PrefillSpan(2, 4, 5),
        PrefillSpan(4, 0, 3),
    ]
    assert sequence.pieces == [GeneratorSpan(0, "g0"), GeneratorSpan(4, "g1")]
    assert claims(turn) == [
        Segment(0, 2, UNKNOWN, 2),
        Segment(2, 4, 4, 2),
        Segment(0, 4, UNKNOWN, 4),
        Segment(4, 6, 5, 4),
        Segment(0, 8, 3, 6),
    ]


def test_nothing_is_unknown_of_a_prompt_of_one_token():
    turn = started([parsed("01", version=4)], [parsed("2", version=4, finish="stop")], prompt=[7]).turn()
    assert turn.token_versions == [VersionSpan(0, 4)]
    assert turn.prefill_versions == [PrefillSpan(0, 0, 4), PrefillSpan(2, 0, 4)]
    assert claims(turn, [7]) == [Segment(0, 2, 4, 0), Segment(0, 3, 4, 2)]


def test_an_engine_that_aborts_a_request_has_sent_its_events():
    aborted = parsed("23", 2, version=5, finish="abort")
    aborted.prefill_versions = [PrefillSpan(0, 0, 4), PrefillSpan(1, 0, 5), PrefillSpan(4, 0, 6)]
    turn = started([parsed("01", version=5), aborted], [parsed("4", version=7, finish="stop")]).turn()
    assert turn.prefill_versions == [PrefillSpan(0, 0, 4), PrefillSpan(1, 0, 5), PrefillSpan(4, 0, 7)]


def test_two_generators_are_lost_one_after_the_other():
    turn = started([parsed("01")], [parsed("23", version=1)], [parsed("4", version=2, finish="stop")]).turn()
    assert turn.prefill_versions[-3:] == [PrefillSpan(2, 0, UNKNOWN), PrefillSpan(2, 4, 1), PrefillSpan(4, 0, 2)]
    assert turn.token_versions == [VersionSpan(0, 0), VersionSpan(2, 1), VersionSpan(4, 2)]


def test_a_generator_that_gave_no_token_leaves_no_trace():
    sequence = started([parsed("01")], [], [parsed("2", version=1, finish="stop")])
    assert sequence.pieces == [GeneratorSpan(0, "g0"), GeneratorSpan(2, "g2")]
    sequence.drop_piece()
    assert (sequence.token_ids, sequence.pieces) == ([0, 1], [GeneratorSpan(0, "g0")])
    sequence.restart()
    assert (sequence.token_ids, sequence.pieces, sequence.finish_reason) == ([], [], None)


def test_a_stop_string_across_the_seam_cuts_tokens_and_tags():
    sequence = started([parsed("01")], [parsed("23", version=1), parsed("45", 2, version=2)])
    sequence.cut(3)
    sequence.lose()
    sequence.finish_reason = "stop"
    turn = sequence.turn()
    assert (turn.token_ids, turn.token_versions) == ([0, 1, 2], [VersionSpan(0, 0), VersionSpan(2, 1)])
    assert claims(turn)[-2:] == [Segment(0, 4, UNKNOWN, 4), Segment(4, 5, 1, 4)]


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (chunk("23", 1), RetryableFailure, "must start at token 2"),
        (chunk("23", 3), RetryableFailure, "must start at token 2"),
        (chunk("23", 2) | {"token_versions": [[2, 0], [4, 1]]}, RetryableFailure, "does not fit"),
        (chunk("23", 2) | {"packed_logprobs": packed([2, 3])[:-4]}, RetryableFailure, "27 bytes are no packed"),
        (chunk("23", 2) | {"packed_logprobs": packed([2, 3], [-1.0, float("nan")])}, Rejected, "1 of 2 .* no numbers"),
        (chunk("23", 2) | {"packed_logprobs": None}, Unpatched, "older patch"),
        (chunk("23", 2) | {"token_versions": None}, Unpatched, "not patched"),
        (chunk("23", 2, finish="stop") | {"prefill_versions": None}, Unpatched, "not patched"),
        (chunk("2" * 9, 2), RetryableFailure, "more than the requested 10 tokens"),
    ],
)
def test_a_damaged_chunk_leaves_the_sequence_as_it_was(bad, error, text):
    sequence = started([parsed("01")], most=10)
    before = sequence.turn()
    with pytest.raises(error, match=text):
        sequence.add(choice_of(bad))
        sequence.turn()
    assert sequence.turn() == before


DAMAGED = {"packed_logprobs": packed([-1, 3])}


def test_a_damaged_field_is_found_after_so_many_tokens():
    sequence = started([parsed("01"), parsed("23", 2, **DAMAGED)], most=READ_AT_ONCE + 9)
    for start in range(4, READ_AT_ONCE, 2):
        assert sequence.length == start
        with pytest.raises(RetryableFailure, match="-1 is no token id") if start == READ_AT_ONCE - 2 else nullcontext():
            sequence.add(parsed("45", start))
    assert (sequence.length, sequence.token_ids) == (0, [])


def test_what_a_lost_generator_sent_is_not_continued_where_it_is_damaged():
    """Not even what was read of it before."""
    sequence = started([parsed("01", version=4)], [parsed("2", version=5)])
    assert sequence.token_ids == [0, 1, 2]
    sequence.add(parsed("34", 1, version=6, **DAMAGED))
    sequence.lose()
    assert (sequence.token_ids, sequence.pieces) == ([0, 1], [GeneratorSpan(0, "g0")])
    sequence.begin("g2")
    sequence.add(parsed("5", version=7, finish="stop"))
    turn = sequence.turn()
    assert (turn.token_ids, turn.token_versions) == ([0, 1, 5], [VersionSpan(0, 4), VersionSpan(2, 7)])
    assert [each.version for each in turn.prefill_versions] == [UNKNOWN, 4, 7]


def test_a_lost_generators_log_probability_that_is_no_number_rejects_the_sample():
    sequence = started([parsed("01"), parsed("2", 2, packed_logprobs=packed([2], [float("nan")]))])
    with pytest.raises(Rejected, match="g0: 1 of 3"):
        sequence.lose()


def test_many_chunks_are_the_whole_answer():
    """More than are read at once, of several versions, and with kept sets."""
    sequence, tokens = Sequence(3, 5000, asked=3), 2500
    sequence.begin("g0")
    for start in range(0, tokens, 5):
        ids, others = [(start + each) % 9 for each in range(5)], [{(start + each) % 7 + 10: -1.0} for each in range(5)]
        field, version = packed(ids, [-each / 8 for each in ids], others), start // 1000
        finish = "length" if start + 5 == tokens else None
        sequence.add(parsed("01234", start, version, finish, packed_logprobs=field))
    turn = sequence.turn()
    assert turn.token_ids == [each % 9 for each in range(tokens)]
    assert turn.logprobs == [-(each % 9) / 8 for each in range(tokens)]
    assert turn.kept == [[each % 9, each % 7 + 10] for each in range(tokens)]
    assert turn.token_versions == [VersionSpan(0, 0), VersionSpan(1000, 1), VersionSpan(2000, 2)]


def test_kept_sets_are_joined():
    sequence = Sequence(3, 8, asked=3)
    for generator, others in (("g0", {5: -0.1, 3: -2.0}), ("g1", {7: -0.4, 1: -1.0, 2: -1.0}), ("g2", {8: -0.4})):
        sequence.begin(generator)
        sequence.add(parsed("0", packed_logprobs=packed([6], others=[others])))
    assert sequence.turn().kept == [[], [], [6, 8]]
