"""The rollout file: round trips, and a file cut or damaged anywhere keeps its good frames."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import make_group

from inflight.rollout import stream
from inflight.rollout.stream import MAGIC, Reader, StreamError, Writer, encode_frame

GROUPS = [make_group(f"group {i}", size=1 + i, length=3 * i, spans=[(0, i)] if i else []) for i in range(4)]
FRAMES = [encode_frame(group) for group in GROUPS]
WHOLE = MAGIC + b"".join(FRAMES)
ENDS = [len(MAGIC) + sum(map(len, FRAMES[:count])) for count in range(len(FRAMES) + 1)]


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
    assert reader.good_bytes == path.stat().st_size
    assert path.read_bytes() == WHOLE


def test_each_group_is_on_disk_when_append_returns(tmp_path):
    with Writer(tmp_path / "r") as writer:
        for count, group in enumerate(GROUPS, start=1):
            writer.append(group)
            assert list(Reader(tmp_path / "r")) == GROUPS[:count]


@settings(deadline=None)
@given(st.integers(len(MAGIC), len(WHOLE)))
def test_a_file_cut_anywhere_keeps_its_whole_frames(path, length):
    path.write_bytes(WHOLE[:length])
    reader = Reader(path)
    whole = sum(end <= length for end in ENDS) - 1
    assert list(reader) == GROUPS[:whole]
    assert (reader.torn is None) == (length in ENDS)
    if reader.torn is not None:
        assert f"{length - ENDS[whole]} bytes of a frame's" in reader.torn or " of a frame's " in reader.torn
    assert reader.good_bytes == ENDS[whole]


@settings(deadline=None)
@given(st.integers(len(MAGIC), len(WHOLE) - 1), st.integers(1, 255))
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
    path.write_bytes(MAGIC + b"x" * 100 + FRAMES[0])
    for size in range(1, 40):
        monkeypatch.setattr(stream, "_SEARCHED_BYTES", size)
        with pytest.raises(StreamError, match=f"from byte {len(MAGIC) + 100} on"):
            list(Reader(path))


def test_a_frame_that_a_writer_completes_meanwhile_is_no_damage(path):
    """A reader of a run that goes on: it saw half a frame, and looks again when more has come."""
    path.write_bytes(MAGIC + FRAMES[0] + FRAMES[1][:-1])

    class Late(Reader):
        def _next_frame(self, file):
            path.write_bytes(WHOLE)
            return super()._next_frame(file)

    assert list(Late(path)) == GROUPS[:1]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_after_the_magic_is_reported(path, garbage):
    path.write_bytes(MAGIC + garbage)
    reader = Reader(path)
    assert list(reader) == []
    assert (reader.torn is None) == (garbage == b"")


def test_a_well_formed_frame_that_is_no_group_is_reported(tmp_path):
    body = b"\x81\xa1x\x01"
    frame = stream._HEAD.pack(len(body), stream.zlib.crc32(body)) + body
    (tmp_path / "r").write_bytes(MAGIC + FRAMES[0] + frame)
    reader = Reader(tmp_path / "r")
    assert list(reader) == GROUPS[:1]
    assert "is no group" in reader.torn


@pytest.mark.parametrize("start", [b"", b"inflro", b"PK\x03\x04 and more"])
def test_another_file_is_refused(tmp_path, start):
    (tmp_path / "r").write_bytes(start)
    with pytest.raises(StreamError, match="not a rollout stream"):
        list(Reader(tmp_path / "r"))


def test_a_writer_continues_after_cutting_a_torn_tail(tmp_path):
    path = tmp_path / "r"
    assert len(FRAMES[0]) < len(FRAMES[3]) - 5, "the tail is longer than what replaces it"
    path.write_bytes(MAGIC + FRAMES[1] + FRAMES[3][:-5])
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
    monkeypatch.setattr(stream, "MAX_BODY_BYTES", 100)
    with Writer(tmp_path / "r") as writer, pytest.raises(StreamError, match="exceeds the limit"):
        writer.append(GROUPS[3])
    assert (tmp_path / "r").read_bytes() == MAGIC


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
