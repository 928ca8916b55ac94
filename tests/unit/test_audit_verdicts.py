"""Three verdicts: a record that is wrong fails, one that shows nothing is not passed, whatever the dtype."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from audit_samples import LENGTH, Generator, NoisyRun, at, generate, retag, write
from safetensors.torch import load_file, save_file

from inflight.audit import main, run
from inflight.audit.alone import Trial, explain
from inflight.audit.alternatives import by_name
from inflight.audit.claims import Claims
from inflight.audit.compare import Auditor
from inflight.audit.evidence import Verdict
from inflight.audit.replay import KeptVersions, TransformersReplayer
from inflight.audit.report import AuditOutcome
from inflight.audit.segments import Segment
from inflight.config import Sampling
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader, Writer
from inflight.types import GeneratorSpan, PrefillSpan

PLANS = [at(0, 5, 9), at(0, 3), at(0, 8, 12), [1] * 16]
GARBAGE = {
    "constant": lambda turn, source: [-1.0] * len(turn.logprobs),
    "random": lambda turn, source: (-8 * source.random(len(turn.logprobs))).tolist(),
    "a token late": lambda turn, source: [turn.logprobs[-1], *turn.logprobs[:-1]],
    "offset": lambda turn, source: [value + 0.05 for value in turn.logprobs],
}


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory, tiny_model):
    made = NoisyRun(tmp_path_factory.mktemp("noisy"), tiny_model)
    made.audit(tagged=PLANS, many=60, alternatives="none")
    return made


def recorded(noisy_run, many=60):
    return [rollout for group in Reader(noisy_run.folder / ROLLOUTS_FILE) for rollout in group.rollouts][:many]


def judged(noisy_run, rollouts, replayer=None, alternatives=()):
    kept = KeptVersions(noisy_run.folder / "versions")
    return Auditor(replayer or noisy_run.replayer, kept).audit(
        rollouts, run="run", dtype="float32", alternatives=alternatives
    )


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("many", [8, 60])
def test_a_bfloat16_record_that_is_garbage_fails(noisy_run, garbage, many):
    source = np.random.default_rng(0)
    wrong = retag(
        [(rollout, rollout.prompt_ids) for rollout in recorded(noisy_run, many)],
        lambda turn: {"logprobs": GARBAGE[garbage](turn, source)},
    )
    report = judged(noisy_run, [rollout for rollout, _ in wrong])
    assert report.outcome is AuditOutcome.FAILED, report.open


def test_a_record_that_does_not_fit_rules_nothing_out(noisy_run):
    wrong = retag(
        [(rollout, rollout.prompt_ids) for rollout in recorded(noisy_run)],
        lambda turn: {"logprobs": GARBAGE["constant"](turn, None)},
    )
    report = judged(noisy_run, [rollout for rollout, _ in wrong], alternatives=[by_name("old", 3), by_name("head", 3)])
    verdicts = [
        each.verdict
        for hypothesis in report.hypotheses
        for each in (hypothesis.overall, *hypothesis.by_version.values())
    ]
    assert len(verdicts) > 4
    assert Verdict.TAGS not in verdicts


def test_log_probabilities_of_other_rollouts_fail(noisy_run):
    rollouts = recorded(noisy_run)
    logprobs = [rollout.turn.logprobs for rollout in rollouts]
    other = iter([*logprobs[1:], logprobs[0]])
    wrong = retag([(rollout, rollout.prompt_ids) for rollout in rollouts], lambda turn: {"logprobs": next(other)})
    assert judged(noisy_run, [rollout for rollout, _ in wrong]).outcome is AuditOutcome.FAILED


def test_few_prompts_of_a_sound_bfloat16_run_are_not_shown(noisy_run, capsys):
    assert main([str(noisy_run.folder), "--limit", "8", "--alternatives", "none"]) == 3
    out = capsys.readouterr().out
    assert "8 prompts are too few to tell versions by, 20 are needed" in out
    why = "no fault was found, but it is not shown that there is none"
    assert out.endswith(f"not shown, for 8 of {len(recorded(noisy_run, None))} rollouts (--limit): {why}\n")


# --- the same kernels -----------------------------------------------------------------------------------------------


class SameKernels(TransformersReplayer):
    """As if it rounded as the engine that recorded does."""

    rounds_alike = True


@pytest.fixture(scope="module")
def exact_run(noisy_run, tiny_model):
    """(run, its rollouts as the replay gives them, replayer)."""
    made, rollouts = noisy_run, recorded(noisy_run, 8)
    replayer = SameKernels(tiny_model, KeptVersions(made.folder / "versions"), Sampling())
    claims = Claims.of(rollouts, KeptVersions(made.folder / "versions"))
    exact = iter(replayer.replay([claim.sequence for claim in claims.whole]))
    sound = retag([(rollout, rollout.prompt_ids) for rollout in rollouts], lambda turn: {"logprobs": next(exact)})
    return made, [rollout for rollout, _ in sound], replayer


def test_what_comes_out_bit_for_bit_passes_with_eight_prompts(exact_run):
    noisy, rollouts, replayer = exact_run
    assert judged(noisy, rollouts, replayer).outcome is AuditOutcome.PASSED


@pytest.mark.parametrize("by", [0.01, 1e-6])
def test_one_value_of_one_rollout_fails(exact_run, by):
    noisy, rollouts, replayer = exact_run
    turn = rollouts[3].turn
    logprobs = [value + by * (index == 7) for index, value in enumerate(turn.logprobs)]
    wrong = msgspec.structs.replace(rollouts[3], turn=msgspec.structs.replace(turn, logprobs=logprobs))
    report = judged(noisy, [*rollouts[:3], wrong, *rollouts[4:]], replayer)
    assert report.outcome is AuditOutcome.FAILED
    assert any(f"1 of {len(rollouts)} rollouts do not come out alike" in fault for fault in report.faults)
    assert any(f"at token 7 of {wrong.rollout_id}" in fault for fault in report.faults)


def test_nothing_alike_fails_with_nineteen_prompts(noisy_run, tiny_model):
    replayer = SameKernels(tiny_model, KeptVersions(noisy_run.folder / "versions"), Sampling())
    report = judged(noisy_run, recorded(noisy_run, 19), replayer)
    assert report.total.same.share == 0
    assert any("the whole run: only 0% of the tokens come out alike" in fault for fault in report.faults)


def test_steps_in_which_a_sequence_was_alone_are_found():
    """A toy engine whose lone rows round another way: a value depends on the kernels of all steps before."""
    length = 90
    truth = [3 < token <= 11 or token >= 70 for token in range(length)]

    def value(modes, token):
        shows = sum(mode for mode in modes[: token + 1]) % 7 == 3  # seldom, as with lone rows
        return -1.0 - 0.01 * token - (1e-3 * sum(modes[: token + 1]) if shows or token % 5 == 0 else 0.0)

    def go(trials):
        for trial in trials:
            modes = []
            while trial.todo:
                trial.todo.pop()
                modes.append(trial.alone)
                trial.logprobs.append(value(modes, len(trial.logprobs)))
                trial.judge()

    def trial(sequence, wanted, turns):
        tokens, passes, kept = sequence
        return Trial(list(tokens), list(passes)[::-1], kept, turns=turns, recorded=wanted)

    wanted = [value(truth, token) for token in range(length)]
    sequence = ([0] * (length + 1), [Segment(at, at + 1, 0, at) for at in range(length)], ())
    wrong = [each + 0.5 * (token == 40) for token, each in enumerate(wanted)]
    assert explain([sequence, sequence], [wanted, wrong], go, trial) == [wanted, None]


# --- what the run itself says ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tiny_model):
    """A sound float32 run of four groups, with what a run tells of itself."""
    generator = Generator(tiny_model)
    write(tmp_path, tiny_model, generator, generate(generator))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 1, "rollouts": 8, "tokens": 8 * LENGTH}))
    swaps = [{"event": "committed", "generator": "g0", "version": version} for version in (1, 2)]
    (tmp_path / "swaps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in swaps))
    assert main([str(tmp_path)]) == 0
    return tmp_path


def rewrite(folder, change):
    """The rollout file with `change(groups)` in it."""
    groups = change(list(Reader(folder / ROLLOUTS_FILE)))
    (folder / ROLLOUTS_FILE).unlink()
    with Writer(folder / ROLLOUTS_FILE) as writer:
        for group in groups:
            writer.append(group)


def without_a_rollout(groups):
    return [*groups[:-1], msgspec.structs.replace(groups[-1], rollouts=groups[-1].rollouts[:1])]


@pytest.mark.parametrize("told_by", ["summary.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[:1] + groups[2:],
        lambda groups: groups[:2],
        lambda groups: [*groups, groups[1]],
        without_a_rollout,
        lambda groups: [],
    ],
    ids=["group dropped", "half of them", "group doubled", "rollout dropped", "all"],
)
def test_groups_that_are_lost_doubled_or_cut_fail(folder, capsys, change, told_by):
    for name in {"summary.json", "metrics.jsonl"} - {told_by}:
        (folder / name).unlink()
    rewrite(folder, change)
    assert main([str(folder)]) == 1
    assert any(each in capsys.readouterr().out for each in ("recorded", "of 2 rollouts"))


def test_what_is_lost_doubled_or_cut_is_named(folder, capsys):
    rewrite(folder, lambda groups: [groups[0], groups[0], *without_a_rollout(groups[2:])])
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "q1: trained on, but not recorded" in out
    assert "q0: recorded more than once" in out
    assert "q3: 1 of 2 rollouts" in out


def test_a_group_that_is_there_under_another_name_as_well_is_found(folder, capsys):
    rewrite(folder, lambda groups: [*groups, msgspec.structs.replace(groups[1], group_id="q9")])
    (folder / "summary.json").unlink()
    assert main([str(folder)]) == 1
    assert "g/2, g/3: recorded more than once" in capsys.readouterr().out


def test_a_run_that_tells_nothing_of_itself_is_not_passed(folder, capsys):
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    assert main([str(folder)]) == 3
    assert "there is no metrics.jsonl and no summary.json to say how many groups" in capsys.readouterr().out


def test_groups_that_were_never_trained_on_are_missed_too(folder, capsys):
    metrics = json.loads((folder / "metrics.jsonl").read_text()) | {"questions": [0]}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    rewrite(folder, lambda groups: groups[:3])
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "the run had produced 4 groups by its last step, 3 are recorded" in out
    assert "summary.json says 8 rollouts, 6 are recorded" in out


def test_a_version_that_was_never_acknowledged_is_a_fault(folder, capsys):
    (folder / "swaps.jsonl").write_text(json.dumps({"event": "committed", "generator": "g0", "version": 1}) + "\n")
    assert main([str(folder)]) == 1
    assert "g0 tagged tokens with version 2, which it never acknowledged" in capsys.readouterr().out


def test_a_torn_tail_is_not_passed(folder, capsys):
    with (folder / ROLLOUTS_FILE).open("ab") as file:
        file.write(b"\x10\x00\x00")
    assert main([str(folder)]) == 3
    assert "the rollout file's tail is torn: 3 bytes of a frame's 8-byte head" in capsys.readouterr().out


def test_damaged_reports_are_one_line(folder, capsys):
    for name in ("summary.json", "swaps.jsonl", "metrics.jsonl"):
        (folder / name).write_text('{"what": 1}\n')
        assert main([str(folder)]) == 2
        assert "metrics.jsonl, swaps.jsonl or summary.json is damaged" in capsys.readouterr().err


def test_a_file_of_another_version_is_refused(folder, capsys):
    path = folder / "versions" / "000001.safetensors"
    save_file(load_file(path), path, metadata={"version": "7"})
    assert main([str(folder)]) == 2
    assert "000001.safetensors holds version 7" in capsys.readouterr().err


def test_versions_of_another_run_fail(folder, tiny_model):
    other = Generator(tiny_model, step=0.06)
    for version in (1, 2):
        save_file(other.states[version], folder / "versions" / f"{version:06d}.safetensors")
    assert run(folder).outcome is AuditOutcome.FAILED


def continued(rollout):
    """As if g1 had continued from token 5, and the record of g0's KV was lost."""
    turn = msgspec.structs.replace(
        rollout.turn,
        prefill_versions=[PrefillSpan(0, 0, -1), PrefillSpan(0, 1, rollout.turn.prefill_versions[0].version)],
    )
    pieces = [GeneratorSpan(0, "g0"), GeneratorSpan(5, "g1")]
    return msgspec.structs.replace(rollout, turn=turn, generator="g1", pieces=pieces)


def test_rollouts_that_lost_a_generator_are_not_checked_but_do_not_hide_the_others(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    honest = [generator.rollout(number, [3, 4, 5], at(0, 5)) for number in range(12)]
    lost = [(continued(honest[0][0]), honest[0][1])]
    write(tmp_path, tiny_model, generator, lost + honest[1:])
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 1, "rollouts": 12, "tokens": 12 * LENGTH}))
    swaps = [{"event": "committed", "generator": name, "version": 1} for name in ("g0", "g1")]
    (tmp_path / "swaps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in swaps))
    assert main([str(tmp_path)]) == 0
    assert f"not checked: {LENGTH} tokens of rollouts that lost a generator" in capsys.readouterr().out
    (tmp_path / "swaps.jsonl").write_text(json.dumps(swaps[0]) + "\n")
    assert main([str(tmp_path)]) == 1, "g1 made the tokens from the fifth on, which are of version 1"
    assert "g1 tagged tokens with version 1, which it never acknowledged" in capsys.readouterr().out


def test_too_many_rollouts_that_lost_a_generator_are_not_shown(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    honest = [generator.rollout(number, [3, 4, 5], at(0, 5)) for number in range(4)]
    write(
        tmp_path, tiny_model, generator, [(continued(rollout), prompt) for rollout, prompt in honest[:2]] + honest[2:]
    )
    assert main([str(tmp_path)]) == 3
    assert "32 tokens could not be checked, their generators were lost; 32 were" in capsys.readouterr().out
