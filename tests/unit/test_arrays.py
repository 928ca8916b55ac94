"""Arrays of one number per token: what they hold, equal and refuse, and their bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from inflight.arrays import Flags, Floats, Lags, Sets, Tokens, convert, from_msgpack, to_msgpack


class Record(msgspec.Struct, frozen=True):
    ids: Tokens
    numbers: Floats | None = None
    sets: Sets | None = None

    def __post_init__(self) -> None:
        convert(self, ids=Tokens, numbers=Floats, sets=Sets)


def decoded(frame: bytes) -> Record:
    return msgspec.msgpack.decode(frame, type=Record, dec_hook=from_msgpack)


def test_they_are_sequences_and_equal_lists_of_the_same_numbers() -> None:
    ids = Tokens([3, 1, 2])
    assert (len(ids), ids[0], ids[-1], list(ids), max(ids), bool(Tokens())) == (3, 3, 2, [3, 1, 2], 3, False)
    assert ids[1:] == [1, 2]
    assert isinstance(ids[1:], Tokens)
    assert ids == [3, 1, 2]
    assert ids != [3, 1]
    assert ids != [3, 1, 4]
    assert ids != [3, 1, "2"]
    assert Floats([-0.1]) == [-0.1], "as far as float32 goes"
    assert Floats([float("nan")]) != [float("nan")]
    assert Flags([True, False]) == [True, False]
    assert Lags([1 << 40]) == [1 << 40]
    sets = Sets([[1, 2], [], [7]])
    assert sets == [[1, 2], [], [7]]
    assert (sets[2], sets.widest, len(sets)) == ([7], 2, 3)
    assert [type(each) for each in sets] == [Tokens] * 3


def test_their_bytes_come_back_as_they_were() -> None:
    record = Record(ids=[0, (1 << 31) - 1], numbers=[-0.5, 1e-40], sets=[[5], [], [6, 7]])
    frame = msgspec.msgpack.encode(record, enc_hook=to_msgpack)
    assert decoded(frame) == record
    plain = msgspec.msgpack.decode(frame)
    assert np.frombuffer(plain["ids"], "<i4").tolist() == [0, (1 << 31) - 1]
    counts, ids = plain["sets"]
    assert (np.frombuffer(counts, "<u2").tolist(), np.frombuffer(ids, "<i4").tolist()) == ([1, 0, 2], [5, 6, 7])
    assert record.sets.tolist() == [[5], [], [6, 7]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1 << 31], "beyond int32"),
        ([-1], "-1 is no token id"),
        ([0.5], "not int32 values: float64"),
        ([True], "not int32 values: bool"),
        (["a"], "ids: "),
        ([[1]], r"shape \(1, 1\)"),
        ([None], "not int32 values"),
        (range((1 << 20) + 1), "up to 1048576 elements"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Record(ids=values)


@pytest.mark.parametrize(
    "wire",
    [
        {"ids": [1, 2]},
        {"ids": b"123"},
        {"ids": "1234"},
        {"ids": b"\xff" * 4},
        {"ids": bytes(4 * (1 << 20) + 4)},
        {"ids": b"", "numbers": b"12345"},
        {"ids": b"", "sets": b""},
        {"ids": b"", "sets": [b"\1", b""]},
        {"ids": b"", "sets": [b"\1\0", b""]},
        {"ids": b"", "sets": [b"\1\0", b"\xff" * 4]},
        {"ids": b"", "sets": [b""]},
    ],
)
def test_what_no_array_has_made_is_refused(wire: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(msgspec.msgpack.encode(wire))
