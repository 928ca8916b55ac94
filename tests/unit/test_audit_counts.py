"""What is lost of a record is found by what the run wrote elsewhere."""

import json

import msgspec
import pytest
from rollout_samples import make_config, make_rollout

from inflight.audit import counts
from inflight.audit.record import read
from inflight.launcher.resume import forget_end
from inflight.rollout.stream import Writer
from inflight.types import RolloutGroup

STEPS = 4


def group(number, size=2, attempt="", later=0.0):
    name = f"q{number}{attempt}"
    members = [
        msgspec.structs.replace(make_rollout(name, each, length=5 + number), started=10.0 * number + each + later)
        for each in range(size)
    ]
    return RolloutGroup(group_id=name, prompt_key=f"k{number}", rollouts=members)


def line(step):
    """Of a step that was trained on two groups; one rollout of the first was left out."""
    questions = [2 * step - 2, 2 * step - 1]
    return {
        "step": step,
        "version": step,
        "questions": questions,
        "left_out": [f"q{questions[0]}/0"],
        "tokens_trained": 5 + questions[0],
        "tokens_masked": 2 * (5 + questions[1]),
        "swaps": step,
        "groups_granted": 2 * step,
        "groups_in_flight": 0,
        "groups_failed": {},
    }


class Folder:
    """A run folder; a test changes its parts and writes it."""

    def __init__(self, path):
        self.path = path
        self.groups = [group(number) for number in range(2 * STEPS)]
        self.lines = [line(step) for step in range(1, STEPS + 1)]
        self.swaps = [{"event": "committed", "generator": "g0", "version": version} for version in range(STEPS + 1)]
        tokens = sum(len(each.turn.token_ids) for made in self.groups for each in made.rollouts)
        self.summary = {"steps": STEPS, "rollouts": 4 * STEPS, "tokens": tokens}
        self.newest = STEPS
        self.tail = ""

    def found(self):
        """(faults, what is unknown)."""
        rollouts = self.path / "rollouts.msgpack"
        rollouts.unlink(missing_ok=True)
        with Writer(rollouts) as writer:
            for each in self.groups:
                writer.append(each)
        for name, lines in (("metrics", self.lines), ("swaps", self.swaps)):
            if lines is not None:
                text = "".join(json.dumps(each) + "\n" for each in lines)
                (self.path / f"{name}.jsonl").write_text(text + (self.tail if name == "metrics" else ""))
        if self.summary is not None:
            (self.path / "summary.json").write_text(json.dumps(self.summary))
        told = counts.Told.read(self.path, self.newest)
        return counts.faults(read(rollouts, None).census, told, group_size=2, start_version=0), counts.unknown(told)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_a_sound_run_and_one_that_has_not_ended(folder, tmp_path):
    assert folder.found() == ([], [])
    (tmp_path / "summary.json").unlink()
    folder.summary, folder.newest = None, STEPS + 1  # the next version is written before its line
    assert folder.found() == ([], [])


def test_a_question_that_was_too_stale_at_first(folder):
    """Its next group has the same seeds, and may have the same tokens, at another time."""
    folder.groups.insert(1, group(0, attempt=".1", later=100.0))
    folder.lines[0]["left_out"] = ["q0.1/0"]
    folder.summary = None
    assert folder.found() == ([], [])


@pytest.mark.parametrize("ended", [True, False])
def test_steps_whose_lines_are_lost_with_their_groups(folder, ended):
    folder.groups, folder.lines = folder.groups[:4], folder.lines[:2]
    folder.summary = folder.summary if ended else None
    said = "summary.json says 4 steps, metrics.jsonl has 2"
    assert (said if ended else "version 4 was kept, metrics.jsonl ends with step 2") in folder.found()[0]


def test_all_lines_lost(folder):
    folder.groups, folder.lines, folder.summary = folder.groups[:1], [], None
    faults, unknown = folder.found()
    assert faults == ["version 4 was kept, metrics.jsonl ends with step 0"]
    assert unknown == ["metrics.jsonl has no lines, and there is no summary.json, to say how many groups there are"]


def test_a_line_lost_in_the_middle_or_at_the_start(folder):
    folder.summary = None
    gone = folder.lines.pop(1)
    assert folder.found()[0] == ["metrics.jsonl has no line between those of the steps 1 and 3"]
    folder.lines[:1] = [gone]
    assert folder.found()[0] == ["metrics.jsonl begins with step 2, the run with 1"]


def test_tokens_lost_of_a_rollout_that_was_trained_on(folder):
    folder.summary = None
    cut = make_rollout("q3", 0, length=1)
    folder.groups[3] = msgspec.structs.replace(folder.groups[3], rollouts=[cut, folder.groups[3].rollouts[1]])
    assert folder.found()[0] == ["step 2 was trained on 23 tokens, its rollouts have 16"]


def test_a_copy_under_other_names(folder):
    folder.groups[1] = msgspec.structs.replace(
        folder.groups[0],
        group_id="q1",
        rollouts=[
            msgspec.structs.replace(each, group_id="q1", rollout_id=f"q1/{number}")
            for number, each in enumerate(folder.groups[0].rollouts)
        ],
    )
    assert "2 rollouts are copies of others, under other names" in folder.found()[0]


def test_the_start_version_needs_an_acknowledgement_too(folder):
    strange = [msgspec.structs.replace(each, generator="g7") for each in folder.groups[0].rollouts]
    folder.groups[0] = msgspec.structs.replace(folder.groups[0], rollouts=strange)
    assert folder.found()[0] == ["g7 tagged tokens with version 0, which it never acknowledged"]


def test_files_that_are_lost_or_torn_leave_it_unknown(folder, tmp_path):
    folder.swaps, folder.tail = None, '{"step": 5, "ver'
    assert folder.found() == (
        [],
        [
            "the last line of metrics.jsonl is torn",
            "there is no swaps.jsonl to say which versions were sent to which generator",
        ],
    )
    (tmp_path / "metrics.jsonl").unlink()
    folder.lines = None
    assert folder.found()[1] == ["there is no metrics.jsonl to say how many groups the run had recorded"]


def test_a_resumed_run_has_no_result_yet(folder, tmp_path):
    """Else the old summary would contradict the lines from which the run resumes."""
    folder.found()
    config = make_config(tmp_path)
    forget_end(config)
    forget_end(config)
    assert not (tmp_path / "summary.json").exists()
