"""Which recorded rollouts a resumed run keeps."""

import msgspec
import pytest
from rollout_samples import make_group

from inflight.rollout import restore as restoring
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.part import part_path, start_of
from inflight.rollout.restore import newest_version, restore
from inflight.rollout.stream import Reader, Writer
from inflight.types import PrefillSpan


def write(path, *groups, size=None):
    with Writer(path, size) as writer:
        for group in groups:
            writer.append(group)


def test_what_is_true_stays_and_what_waits_is_given_back(tmp_path):
    """Settled, waiting, with a tag or a prefill of an undone version, foreign, written twice, torn."""
    path = tmp_path / "rollouts.msgpack"
    settled, waiting = make_group("q0", spans=[(0, 1)]), make_group("q2", spans=[(0, 1), (3, 4)])
    undone = make_group("q1", spans=[(0, 4), (3, 5)])
    refilled = make_group("q3", spans=[(0, 4)], prefill_versions=[PrefillSpan(0, 0, 4), PrefillSpan(5, 0, 5)])
    write(path, settled, undone, waiting, refilled, make_group("foreign"), waiting)
    with path.open("ab") as file:
        file.write(b"\x10\x00\x00")
    books = msgspec.structs.replace(NO_BOOKS, settled_below=1)
    assert [stored.group() for stored in restore(path, books, 4)] == [waiting]
    reader = Reader(path)
    assert list(reader) == [settled, waiting]
    assert reader.torn is None
    assert [stored.group() for stored in restore(path, books, 4)] == [waiting], "a second time changes nothing"
    assert [each.name for each in tmp_path.iterdir()] == ["rollouts.msgpack"]


def test_of_several_answers_to_a_question_the_newest_waits(tmp_path):
    """Of 0 the first was too old; of 1 and 2 too, but the checkpoint is from before; all that led to 3 is settled."""
    path = tmp_path / "rollouts.msgpack"
    names = ["q3", "q0", "q1", "q2", "q0.1", "q1.1", "q3.1"]
    groups = {name: make_group(name) for name in names}
    write(path, *groups.values())
    books = msgspec.structs.replace(NO_BOOKS, settled_beyond=[3], too_old={0: 1})
    assert [stored.name for stored in restore(path, books, 4)] == ["q1", "q2", "q0.1"]
    assert [group.group_id for group in Reader(path)] == ["q3", "q0", "q1", "q2", "q0.1", "q3.1"]


def test_of_several_files_each_is_rewritten_and_an_interrupted_start_is_repeated(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.msgpack"
    groups = [make_group(f"q{index}", spans=[(0, 5 if index % 2 else 1)]) for index in range(6)]
    write(path, *groups, groups[0], size=1)
    books = msgspec.structs.replace(NO_BOOKS, settled_below=1)
    real, calls = restoring.os.replace, []

    def killed(*names):
        calls.append(names)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(*names)

    monkeypatch.setattr(restoring.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        restore(path, books, 4)
    assert [group.group_id for group in Reader(path)] == ["q0", "q2", "q3", "q4", "q5", "q0"]
    assert [stored.name for stored in restore(path, books, 4)] == ["q2", "q4"]
    assert [group.group_id for group in Reader(path)] == ["q0", "q2", "q4"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [part_path(path, n).name for n in range(7)]
    with Writer(path, 1) as writer:
        writer.append(groups[1])
    assert [group.group_id for group in Reader(path)] == ["q0", "q2", "q4", "q1"]


def test_a_run_that_wrote_none(tmp_path):
    assert restore(tmp_path / "rollouts.msgpack", NO_BOOKS, 0) == []
    (tmp_path / "rollouts.msgpack").write_bytes(start_of(bytes(16), 0))
    assert restore(tmp_path / "rollouts.msgpack", NO_BOOKS, 0) == []


def test_the_newest_version_of_a_group():
    assert newest_version(make_group(spans=[(0, 3), (2, 7)])) == 7
    assert newest_version(make_group(spans=[], length=0, prefill_versions=[])) == -1
