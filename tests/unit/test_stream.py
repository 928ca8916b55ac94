"""The rollout file: round trips, and a file cut or damaged anywhere keeps its good frames."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import make_group

from inflight.rollout import frames
from inflight.rollout.frames import StreamError, encode_frame
from inflight.rollout.part import part_path, start_of
from inflight.rollout.stream import FramePlace, Reader, Writer, read_group, recorded

GROUPS = [make_group(f"group {i}", size=1 + i, length=3 * i, spans=[(0, i)] if i else []) for i in range(4)]
FRAMES = [encode_frame(group) for group in GROUPS]
START = start_of(bytes(16), 0)
WHOLE = START + b"".join(FRAMES)
ENDS = [len(START) + sum(map(len, FRAMES[:count])) for count in range(len(FRAMES) + 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("stream") / "rollouts.msgpack"


def test_round_trip(tmp_path):
    path = tmp_path / "rollouts" / "rollouts.msgpack"
    with Writer(path) as writer:
        for group in GROUPS:
            writer.append(group)
    reader = Reader(path)
    assert list(reader) == GROUPS
    assert list(reader) == GROUPS, "each iteration starts anew"
    assert reader.torn is None
    assert path.read_bytes()[len(START) :] == WHOLE[len(START) :]


def test_each_group_is_on_disk_when_append_returns(tmp_path):
    with Writer(tmp_path / "r") as writer:
        for count, group in enumerate(GROUPS, start=1):
            writer.append(group)
            assert list(Reader(tmp_path / "r")) == GROUPS[:count]


@settings(deadline=None)
@given(st.integers(len(START), len(WHOLE)))
def test_a_file_cut_anywhere_keeps_its_whole_frames(path, length):
    path.write_bytes(WHOLE[:length])
    reader = Reader(path)
    whole = sum(end <= length for end in ENDS) - 1
    assert list(reader) == GROUPS[:whole]
    assert (reader.torn is None) == (length in ENDS)
    if reader.torn is not None:
        assert f"{length - ENDS[whole]} bytes of a frame's" in reader.torn or " of a frame's " in reader.torn


@settings(deadline=None)
@given(st.integers(len(START), len(WHOLE) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_never_read_as_data(path, position, flip):
    """Before the last frame it is no torn tail: whole frames follow it, and are neither read nor written over."""
    damaged = bytearray(WHOLE)
    damaged[position] ^= flip
    path.write_bytes(damaged)
    reader = Reader(path)
    whole = sum(end <= position for end in ENDS) - 1
    read = []
    if whole == len(GROUPS) - 1:
        read += reader
    else:
        for use in (lambda: read.extend(iter(reader)), lambda: Writer(path)):
            told = f"damaged: .*at byte {ENDS[whole]} of .* from byte {ENDS[whole + 1]} on"
            with pytest.raises(StreamError, match=told):
                use()
        assert path.read_bytes() == damaged
    assert read == GROUPS[:whole]
    assert f"at byte {ENDS[whole]} " in reader.torn


def test_the_next_frame_is_found_across_the_pieces_that_are_read(path, monkeypatch):
    path.write_bytes(START + b"x" * 100 + FRAMES[0])
    for size in range(1, 40):
        monkeypatch.setattr(frames, "_SEARCHED_BYTES", size)
        with pytest.raises(StreamError, match=f"from byte {len(START) + 100} on"):
            list(Reader(path))


def test_a_frame_that_a_writer_completes_meanwhile_is_no_damage(path, monkeypatch):
    """A reader of an active run: it saw half a frame, and looks again when more is written."""
    path.write_bytes(START + FRAMES[0] + FRAMES[1][:-1])

    real = frames.is_frame

    def late(file, at):
        path.write_bytes(WHOLE)
        return real(file, at)

    monkeypatch.setattr(frames, "is_frame", late)
    assert list(Reader(path)) == GROUPS[:1]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_after_the_magic_is_reported(path, garbage):
    path.write_bytes(START + garbage)
    reader = Reader(path)
    assert list(reader) == []
    assert (reader.torn is None) == (garbage == b"")


def test_a_well_formed_frame_that_is_no_group_is_reported(tmp_path):
    body = b"\x81\xa1x\x01"
    frame = frames.HEAD.pack(len(body), frames.zlib.crc32(body)) + body
    (tmp_path / "r").write_bytes(START + FRAMES[0] + frame)
    reader = Reader(tmp_path / "r")
    assert list(reader) == GROUPS[:1]
    assert "is no group" in reader.torn


@pytest.mark.parametrize("start", [b"", b"inflro", b"PK\x03\x04 and more, more than a start has"])
def test_another_file_is_refused(tmp_path, start):
    (tmp_path / "r").write_bytes(start)
    with pytest.raises(StreamError, match="not a rollout stream"):
        list(Reader(tmp_path / "r"))


def test_a_writer_continues_after_cutting_a_torn_tail(tmp_path):
    path = tmp_path / "r"
    assert len(FRAMES[0]) < len(FRAMES[3]) - 5, "the tail is longer than what replaces it"
    path.write_bytes(START + FRAMES[1] + FRAMES[3][:-5])
    with Writer(path) as writer:
        assert "of a frame's" in writer.cut
        writer.append(GROUPS[0])
    reader = Reader(path)
    assert list(reader) == [GROUPS[1], GROUPS[0]]
    assert reader.torn is None


def test_a_writer_does_not_touch_another_file(tmp_path):
    (tmp_path / "r").write_bytes(b"something precious")
    with pytest.raises(StreamError):
        Writer(tmp_path / "r")
    assert (tmp_path / "r").read_bytes() == b"something precious"


def test_a_group_above_the_limit_is_refused_and_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "MAX_BODY_BYTES", 100)
    with Writer(tmp_path / "r") as writer, pytest.raises(StreamError, match="exceeds the limit"):
        writer.append(GROUPS[3])
    assert (tmp_path / "r").stat().st_size == len(START)


def test_a_short_write_raises(tmp_path):
    with Writer(tmp_path / "r") as writer:
        real = writer._file

        class Full:
            name = "r"

            def write(self, data):
                return len(data) - 1

        writer._file = Full()
        with pytest.raises(OSError, match="could be written"):
            writer.append(GROUPS[0])
        writer._file = real


# --- several files ----------------------------------------------------------------------------------------------------

SIZE = len(WHOLE) - 1
"""Less than the four groups take."""
FILES = 3


@pytest.fixture
def several(tmp_path):
    """Six groups in three files: the stream's path."""
    path = tmp_path / "rollouts.msgpack"
    with Writer(path, SIZE) as writer:
        for group in GROUPS + GROUPS[2:]:
            writer.append(group)
    assert sorted(each.name for each in tmp_path.iterdir()) == [part_path(path, n).name for n in range(FILES)]
    return path


def test_a_stream_goes_on_in_another_file_when_one_has_its_size(several):
    reader = Reader(several)
    places = []
    for group in reader:
        places.append(reader.place)
        assert read_group(several, reader.place) == group
    assert list(reader) == GROUPS + GROUPS[2:]
    assert reader.torn is None
    assert {place.part for place in places} == set(range(FILES))
    assert all(part_path(several, number).stat().st_size <= SIZE for number in range(FILES))
    with pytest.raises(StreamError, match=r"rollouts\.msgpack\.00001 has no frame at byte"):
        read_group(several, places[-1]._replace(part=1, byte=places[-1].byte + 1))


def test_a_whole_frame_that_holds_no_group_is_none(tmp_path):
    path = tmp_path / "rollouts.msgpack"
    body = b"\x80"
    path.write_bytes(START + frames.HEAD.pack(len(body), zlib.crc32(body)) + body)
    with pytest.raises(StreamError, match=r"rollouts\.msgpack has no frame at byte \d+: frame is no group"):
        read_group(path, FramePlace(0, len(START)))


def test_a_writer_continues_the_last_file(several):
    last = part_path(several, FILES - 1)
    last.write_bytes(last.read_bytes()[:-3])
    with Writer(several, SIZE) as writer:
        assert f"of {last.name}" in writer.cut
        writer.append(GROUPS[0])
    assert list(Reader(several)) == GROUPS + GROUPS[2:3] + GROUPS[:1]


def test_a_group_that_is_larger_than_a_file_has_one_to_itself(tmp_path):
    with Writer(tmp_path / "r", 1) as writer:
        for group in GROUPS:
            writer.append(group)
    assert list(Reader(tmp_path / "r")) == GROUPS
    assert len(list(tmp_path.iterdir())) == len(GROUPS)


def test_a_missing_file_is_named(several):
    part_path(several, 1).unlink()
    for use in (lambda: list(Reader(several)), lambda: Writer(several)):
        with pytest.raises(StreamError, match=r"msgpack\.00001 is missing: rollouts\.msgpack ends with a note"):
            use()
    several.unlink()
    for use in (lambda: recorded(several), lambda: Writer(several)):
        with pytest.raises(StreamError, match=r"rollouts\.msgpack is missing, and rollouts\.msgpack\.00002 is there"):
            use()
    assert not several.exists()


def test_a_file_of_another_stream_is_named(several, tmp_path):
    other = tmp_path / "other" / "rollouts.msgpack"
    with Writer(other, SIZE) as writer:
        for group in GROUPS + GROUPS[2:]:
            writer.append(group)
    part_path(several, 1).write_bytes(part_path(other, 1).read_bytes())
    with pytest.raises(StreamError, match=r"msgpack\.00001 is of another stream \("):
        list(Reader(several))
    part_path(several, 1).write_bytes(part_path(several, 2).read_bytes())
    with pytest.raises(StreamError, match=r"msgpack\.00001 is file 2 of its stream: it has the name of file 1"):
        list(Reader(several))


@pytest.mark.parametrize("lost", [8, 11, 8 + len(FRAMES[1])])
def test_a_file_that_has_lost_its_end_is_damaged_when_another_one_follows(several, lost):
    """The note, a part of the last group with it, all of the last group: none may pass for the end of the stream."""
    several.write_bytes(several.read_bytes()[:-lost])
    for use in (lambda: list(Reader(several)), lambda: Writer(several)):
        with pytest.raises(StreamError, match=r"is damaged: .*; groups follow it in rollouts\.msgpack\.00001"):
            use()


def test_a_file_that_was_made_and_not_announced_is_made_again(several):
    """A writer that was killed between the two: nothing can be in it."""
    last = part_path(several, FILES - 1)
    further = part_path(several, FILES)
    further.write_bytes(start_of(last.read_bytes()[8:24], FILES))
    assert list(Reader(several)) == GROUPS + GROUPS[2:]
    with Writer(several, SIZE) as writer:
        for group in GROUPS:
            writer.append(group)
    assert list(Reader(several)) == GROUPS + GROUPS[2:] + GROUPS
