"""The audit against a generator written here: one that keeps its KV over swaps, and can be made to lie."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil

import msgspec
import numpy as np
import pytest
import torch
from audit_samples import (
    EXACT,
    LENGTH,
    NOISE,
    PLANS,
    PROMPTS,
    Generator,
    NoisyRun,
    at,
    generate,
    retag,
    write,
)
from rollout_samples import make_config, make_rollout
from safetensors.torch import save_file
from transformers import AutoConfig

from inflight.audit import AuditError, main, run
from inflight.audit.alternatives import by_name, previous_of
from inflight.audit.command import ReplayProgress
from inflight.audit.evidence import Misses, Verdict, estimate, excess
from inflight.audit.replay import KeptVersions
from inflight.audit.report import AuditOutcome
from inflight.audit.segments import Segment, TagError, segments
from inflight.config import ModelConfig, load, save
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.part import MAGIC
from inflight.types import PrefillSpan, VersionSpan


@pytest.fixture(params=["tiny_model", "tiny_untied_model"])
def model_dir(request):
    return request.getfixturevalue(request.param)


# --- honest rollouts ------------------------------------------------------------------------------------------------


def test_every_token_of_an_honest_generator_is_confirmed(tmp_path, model_dir):
    generator = Generator(model_dir)
    report = run(write(tmp_path, model_dir, generator, generate(generator)), tolerance=EXACT)
    assert report.passed, report.faults
    assert report.total.tokens == len(PLANS) * LENGTH
    assert [row.version for row in report.versions] == [0, 1, 2]
    assert report.swaps == 2 + 2 + 1 + 0 + 1 + 2 + 0 + 1
    assert report.straddling_tokens == 6 * LENGTH
    assert report.same == []
    assert report.mixed_kv_tokens == 11 + 15 + 1 + 0 + 12 + 9 + 0 + 6
    assert json.loads((tmp_path / "audit.json").read_text())["rollouts"] == len(PLANS)


def test_it_says_which_version_is_replayed(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    lines = []
    run(write(tmp_path, tiny_model, generator, generate(generator)), progress=lines.append)
    assert lines == [f"replaying version {number}, {number + 1} of 3" for number in range(3)]
    now = 100.0
    shown = ReplayProgress(lambda: now)
    for now in (104.0, 105.0, 109.0, 111.0):
        shown(f"at {now:g}")
    assert capsys.readouterr().err == "inflight audit: at 105\ninflight audit: at 111\n"


def test_token_by_token_gives_the_same(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    folder = write(tmp_path, tiny_model, generator, generate(generator, preempt={6}))
    at_once, single = run(folder), run(folder, token_by_token=True)
    assert single.passed
    assert single.total.tokens == at_once.total.tokens
    assert single.total.max < EXACT


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}])
def test_the_processed_distribution_is_replayed(tmp_path, tiny_model, sampling):
    generator = Generator(tiny_model, **sampling)
    made = generate(generator)
    if "top_k" in sampling:  # of some tokens the set was not recorded
        made = retag(made, lambda turn: {"kept": [each if index % 3 else [] for index, each in enumerate(turn.kept)]})
    folder = write(tmp_path, tiny_model, generator, made)
    assert run(folder, tolerance=EXACT).passed
    save(dataclasses.replace(make_config(folder), model=ModelConfig(name=str(tiny_model), dtype="float32")))
    assert not run(folder, tolerance=1e-2).passed, "as if sampled from the plain distribution"


def test_a_record_can_not_choose_its_own_sets(tmp_path, tiny_model):
    """Sets of one token each make every log-probability 0, whatever the tags."""
    generator = Generator(tiny_model, top_k=5)
    made = generate(generator)
    assert run(write(folder_of(tmp_path, "sound"), tiny_model, generator, made)).passed
    old = {"token_versions": [VersionSpan(0, 0)], "prefill_versions": [PrefillSpan(0, 0, 0)]}
    forged = retag(made, lambda turn: {"kept": [[t] for t in turn.token_ids], "logprobs": [0.0] * LENGTH, **old})
    report = run(write(folder_of(tmp_path, "forged"), tiny_model, generator, forged))
    assert report.outcome is AuditOutcome.FAILED
    assert any("log-probabilities don't agree" in fault for fault in report.faults), report.faults


def test_sets_that_were_not_recorded_are_computed(tmp_path, tiny_model):
    generator = Generator(tiny_model, top_k=6)
    made = generate(generator)
    generator.top_k = 5
    unknown = retag(made, lambda _: {"kept": None})
    without = run(write(folder_of(tmp_path, "without"), tiny_model, generator, unknown))
    assert not without.passed
    assert math.isfinite(without.total.max), "what was drawn was possible"


def folder_of(path, name):
    (path / name).mkdir()
    return path / name


def test_preemption_and_chunks_over_a_swap_are_honoured(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = [
        generator.rollout(0, PROMPTS[0], at(0, 5, 9), preempt={3, 5, 12}),
        generator.rollout(1, PROMPTS[2], [1] * 8 + [2] * 8, chunk=(4, 0)),
        generator.rollout(2, PROMPTS[2], [2] * LENGTH, chunk=(9, 0), preempt={1}),
        generator.rollout(3, PROMPTS[2], at(0, 5, 9), redo=(11, 7)),
    ]
    report = run(write(tmp_path, tiny_model, generator, made), tolerance=EXACT)
    assert report.passed, report.faults


# --- planted faults -------------------------------------------------------------------------------------------------


def shift(turn, by):
    spans = [VersionSpan(max(0, span.start + by) if span.start else 0, span.version) for span in turn.token_versions]
    return {"token_versions": [*(a for a, b in itertools.pairwise(spans) if a.start < b.start), spans[-1]]}


@pytest.mark.parametrize("by", [1, -1])
def test_fault_a_tags_shifted_by_one_token(tmp_path, model_dir, by):
    generator = Generator(model_dir)
    honest = generate(generator)
    made = retag(honest[:1], lambda turn: shift(turn, by)) + honest[1:]
    report = run(write(tmp_path, model_dir, generator, made), tolerance=1e-4)
    assert not report.passed
    assert report.total.worst.index in range(5 - 1, LENGTH)


@pytest.mark.parametrize("fragment", ["layers.0.", "layers.2.mlp.down_proj", "layers.1.self_attn.k_proj", "model.norm"])
def test_fault_b_a_torn_swap(tmp_path, model_dir, fragment):
    generator = Generator(model_dir)
    generator.leave_old(2, fragment)
    report = run(write(tmp_path, model_dir, generator, generate(generator)), tolerance=1e-4)
    assert not report.passed
    rows = {row.version: row.max for row in report.versions}
    assert rows[0] < EXACT
    assert rows[1] < EXACT
    assert rows[2] > 1e-3, "only the version that was torn is accused"


def test_fault_c_a_stale_output_layer(tmp_path, model_dir):
    generator = Generator(model_dir)
    generator.leave_old(1, "lm_head")
    report = run(write(tmp_path, model_dir, generator, generate(generator)), tolerance=1e-4)
    assert not report.passed
    assert {row.version for row in report.versions if row.max > 1e-4} == {1}


def test_fault_d_a_prefix_hit_across_versions(tmp_path, model_dir):
    generator = Generator(model_dir)
    made = [*generate(generator), generator.rollout(99, PROMPTS[2], [2] * LENGTH, prefix=(8, 1))]
    report = run(write(tmp_path, model_dir, generator, made), tolerance=1e-4)
    assert not report.passed
    assert report.total.worst.rollout_id == "g/99"


def test_fault_e_a_recomputation_that_was_not_reported(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = generate(generator, preempt={10})
    assert run(write(tmp_path / "told", tiny_model, generator, made), tolerance=EXACT).passed
    silent = retag(made, lambda turn: {"prefill_versions": turn.prefill_versions[:1]})
    assert not run(write(tmp_path / "silent", tiny_model, generator, silent), tolerance=1e-4).passed


def test_fault_f_a_recomputation_that_did_not_happen(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    honest = generate(generator)
    more = retag(honest[:1], lambda turn: {"prefill_versions": [*turn.prefill_versions, PrefillSpan(10, 0, 2)]})
    made = more + honest[1:]
    assert not run(write(tmp_path, tiny_model, generator, made), tolerance=1e-4).passed


def test_a_log_probability_that_is_no_number_is_a_fault(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = retag(generate(generator)[:2], lambda turn: {"logprobs": [float("nan"), *turn.logprobs[1:]]})
    report = run(write(tmp_path, tiny_model, generator, made), tolerance=1e-4)
    assert not report.passed
    assert report.total.max == float("inf")


# --- what noise does not hide ---------------------------------------------------------------------------------------


def on_a_gpu(folder, model_dir, made, generator, *, needs_gpu=True):
    """A float32 run whose products were rounded as TF32's are."""
    write(folder, model_dir, generator, made)
    config = load(folder)
    save(dataclasses.replace(config, launch=dataclasses.replace(config.launch, needs_gpu=needs_gpu)))
    return folder


def rounded(turn):
    noise = np.random.default_rng(len(turn.token_ids)).normal(0, 5e-4, len(turn.logprobs))
    return {"logprobs": [value + off for value, off in zip(turn.logprobs, noise, strict=True)]}


def test_float32_on_a_gpu_is_judged_by_the_roundings_of_tf32(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = retag(generate(generator), rounded)
    report = run(on_a_gpu(tmp_path / "gpu", tiny_model, made, generator), alternatives="none")
    assert report.outcome is AuditOutcome.NOT_SHOWN, report.faults
    assert (report.recorded_in, report.exact) == ("tf32", False)
    assert report.open[0].startswith("single tokens can't be judged in tf32")
    on_cpu = on_a_gpu(tmp_path / "cpu", tiny_model, made, generator, needs_gpu=False)
    assert run(on_cpu, alternatives="none").outcome is AuditOutcome.FAILED


def test_single_tokens_of_a_gpu_that_took_no_tf32_can_be_judged(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = generate(generator)
    assert run(on_a_gpu(tmp_path / "sound", tiny_model, made, generator), no_tf32=True).passed
    harmed = on_a_gpu(tmp_path / "harmed", tiny_model, retag(made, rounded), generator)
    assert run(harmed, no_tf32=True).outcome is AuditOutcome.FAILED


def test_no_tf32_is_refused_where_it_has_no_effect(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    write(tmp_path, tiny_model, generator, generate(generator))
    assert main([str(tmp_path), "--no-tf32"]) == 2
    said = capsys.readouterr().err
    assert "--no-tf32 has no effect: the run computed in float32 with machine=cpu, not in float32 on GPUs" in said


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory, tiny_model):
    return NoisyRun(tmp_path_factory.mktemp("noisy"), tiny_model)


def hypotheses(report):
    return {hypothesis.name: hypothesis for hypothesis in report.hypotheses}


def test_noise_alone_is_no_fault_and_other_stories_are_ruled_out(noisy_run):
    report = noisy_run.audit(tagged=PLANS)
    assert report.outcome is AuditOutcome.NOT_SHOWN, report.faults
    assert report.open[0].startswith("single tokens can't be judged in bfloat16")
    assert report.total.max > 3 * NOISE
    found = hypotheses(report)
    assert set(found) == {"late", "early", "old", "prefix", "head"}
    assert found["old"].overall.verdict is Verdict.TAGS
    assert found["head"].overall.verdict is Verdict.TAGS
    assert all(hypothesis.overall.verdict is not Verdict.ALTERNATIVE for hypothesis in report.hypotheses)


def test_an_engine_that_never_swapped_is_found_under_noise(noisy_run):
    report = noisy_run.audit(tagged=[at(0, 4), at(0, 9)], really=[at(0)], alternatives="old")
    assert not report.passed
    assert hypotheses(report)["old"].overall.verdict is Verdict.ALTERNATIVE
    assert any("the version before ran under each tag" in fault for fault in report.faults)


def test_tags_one_token_early_are_found_under_noise(noisy_run):
    many = [[index % 3 if index < cut else 2 for index in range(LENGTH)] for cut in range(3, LENGTH)]
    late = [[plan[0], *plan[:-1]] for plan in many]
    report = noisy_run.audit(tagged=many, really=late, alternatives="late,early", many=30)
    assert hypotheses(report)["late"].overall.verdict is Verdict.ALTERNATIVE
    assert hypotheses(report)["early"].overall.verdict is not Verdict.ALTERNATIVE


def test_a_stale_output_layer_is_found_under_noise(noisy_run):
    report = noisy_run.audit(tagged=PLANS, stale=r"^lm_head\.", alternatives="head")
    assert hypotheses(report)["head"].overall.verdict is Verdict.ALTERNATIVE
    assert not report.passed


def test_a_torn_layer_is_found_under_noise_when_it_is_asked_for(noisy_run):
    report = noisy_run.audit(tagged=[at(0), [1] * LENGTH], stale=r"\.layers\.1\.", alternatives="layer.0,layer.1")
    assert hypotheses(report)["layer.1"].better == [1]
    assert hypotheses(report)["layer.0"].better == []


# --- what can't be audited ------------------------------------------------------------------------------------------


def test_versions_that_were_not_kept_are_named(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    folder = write(tmp_path, tiny_model, generator, generate(generator), versions=[0, 2])
    assert main([str(folder), "--tolerance", "1e-4"]) == 1
    out = capsys.readouterr().out
    assert "version 1 was not kept: 96 tokens depend on it" in out
    report = run(folder)
    assert report.missing == {1: 96}
    assert report.total.tokens == 32


def test_kv_of_unknown_version_is_counted_and_not_replayed(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    made = generate(generator)[:2]
    unknown, prompt = made[0]
    turn = msgspec.structs.replace(unknown.turn, prefill_versions=[PrefillSpan(0, 0, -1), PrefillSpan(0, 3, 0)])
    folder = write(tmp_path, tiny_model, generator, [(msgspec.structs.replace(unknown, turn=turn), prompt), made[1]])
    report = run(folder)
    assert report.outcome is AuditOutcome.NOT_SHOWN, report.faults
    assert report.open == [f"{LENGTH} tokens were not checked, {next(iter(report.unchecked))}"]
    assert list(report.unchecked.values()) == [LENGTH]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prefill_versions": []}, "no prefill event"),
        ({"prefill_versions": [PrefillSpan(0, 2, 0)]}, "KV is known to 0"),
        ({"prefill_versions": [PrefillSpan(0, 0, 1)]}, "token 0 is tagged 0, the prefill that sampled it 1"),
        ({"token_versions": [VersionSpan(1, 0)]}, "must start at token 0"),
    ],
)
def test_tags_that_contradict_themselves_are_a_fault(tmp_path, tiny_model, change, why):
    generator = Generator(tiny_model)
    made = retag(generate(generator)[:1], lambda turn: change) + generate(generator)[1:2]
    report = run(write(tmp_path, tiny_model, generator, made))
    assert not report.passed
    assert why in report.contradictions["g/0"]


def test_a_run_that_was_moved_is_audited_where_it_is(tmp_path, tiny_model):
    generator = Generator(tiny_model)
    folder = write(tmp_path / "before", tiny_model, generator, generate(generator))
    moved = folder.rename(tmp_path / "after")
    assert run(moved, tolerance=1e-4).passed
    shutil.copytree(moved, folder)
    for kept in _versions(moved).iterdir():
        kept.unlink()
    with pytest.raises(AuditError, match=f"{moved}/versions holds no versions"):
        run(moved, tolerance=1e-4)  # those of the other folder are not this run's


def test_a_rollout_file_that_is_damaged_before_its_end_is_not_audited(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    folder = write(tmp_path, tiny_model, generator, generate(generator))
    data = bytearray((folder / ROLLOUTS_FILE).read_bytes())
    data[len(MAGIC) + 20] ^= 1
    (folder / ROLLOUTS_FILE).write_bytes(data)
    assert main([str(folder)]) == 2
    assert "is damaged: frame of " in capsys.readouterr().err


def test_bad_input_is_one_line(tmp_path, tiny_model, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([__file__]) == 2
    assert capsys.readouterr().err.endswith(f"{__file__} is not a run folder\n")
    for option in ("--limit=-1", "--limit=0", "--threads=0", "--tolerance=nan"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path), option])
    generator = Generator(tiny_model)
    folder = write(tmp_path, tiny_model, generator, generate(generator), versions=[])
    assert main([str(folder)]) == 2
    assert "audit.keep_versions=true" in capsys.readouterr().err
    for version in range(3):
        save_file(generator.states[version], _versions(folder) / f"{version:06d}.safetensors")
    for device in ("cuda:99", "nowhere", "meta"):
        assert main([str(folder), "--device", device]) == 2
        assert f"device '{device}' can't be used: " in capsys.readouterr().err
    for given in (["--device", "cpu"], ["--dtype", "float32"], ["--token-by-token"], ["--threads", "1"]):
        assert main([str(folder), "--through", "engine", *given]) == 2
        assert f"{given[0]} does not go with --through engine" in capsys.readouterr().err
    layers = AutoConfig.from_pretrained(tiny_model).num_hidden_layers
    for name in (f"layer.{layers}", "layer.x", "nonsense"):
        assert main([str(folder), "--alternatives", f"old,{name}"]) == 2
        known = f"none of late, early, old, prefix, head, layer.0 to layer.{layers - 1}"
        assert f"--alternatives: '{name}' is {known}" in capsys.readouterr().err
    save_file(generator.states[0] | {"extra": torch.zeros(1)}, _versions(folder) / "000000.safetensors")
    for version in (1, 2):
        save_file(generator.states[version], _versions(folder) / f"{version:06d}.safetensors")
    assert main([str(folder)]) == 2
    assert "000000.safetensors does not fit the run's model" in capsys.readouterr().err
    with pytest.raises(AuditError, match=r"'what' is none of late, .*layer\.0"):
        run(folder, alternatives="late,what")


def _versions(folder):
    (folder / "versions").mkdir(exist_ok=True)
    return folder / "versions"


def test_versions_that_can_not_be_distinguished_are_named(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    generator.states[2] = generator.states[1]
    generator.live[2] = generator.live[1]
    folder = write(tmp_path, tiny_model, generator, generate(generator))
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "tags can't be distinguished: 1 and 2\n" in out
    assert "; 9 times a swap fell into a sequence (one swap may fall into several); " in out, "of two swaps"


def test_each_version_is_loaded_once(tmp_path, tiny_model, monkeypatch):
    loaded, load = [], KeptVersions.load
    monkeypatch.setattr(KeptVersions, "load", lambda self, v: (loaded.append(v), load(self, v))[1])
    generator = Generator(tiny_model)
    run(write(tmp_path, tiny_model, generator, generate(generator, preempt={6})))
    assert loaded == [0, 1, 2]


def test_a_limit_draws_the_same_rollouts_each_time(tmp_path, tiny_model, capsys):
    generator = Generator(tiny_model)
    folder = write(tmp_path, tiny_model, generator, generate(generator))
    first, second = run(folder, limit=3), run(folder, limit=3)
    assert first.rollouts == 3
    assert first.total == second.total
    recorded = run(folder).rollouts
    assert recorded > 3
    for limit, drawn in (("3", f", for 3 of {recorded} rollouts (--limit)"), (str(recorded), "")):
        assert main([str(folder), "--limit", limit]) == 0
        assert capsys.readouterr().out.endswith(f"\npassed{drawn}: every tag that was checked is right\n")


# --- parts ----------------------------------------------------------------------------------------------------------


def tagged(spans, prefills, prompt=3, length=4):
    made = make_rollout(spans=spans, length=length, prefill_versions=[PrefillSpan(*each) for each in prefills])
    return msgspec.structs.replace(made, prompt_ids=list(range(prompt)))


@pytest.mark.parametrize(
    ("spans", "prefills", "expected"),
    [
        ([(0, 5)], [(0, 0, 5)], [(0, 6, 5, 2)]),
        ([(0, 5), (2, 6)], [(0, 0, 5)], [(0, 4, 5, 2), (4, 6, 6, 4)]),
        ([(0, 6)], [(0, 0, 5), (0, 2, 6)], [(0, 2, 5, 2), (2, 6, 6, 2)]),
        ([(0, 5)], [(0, 0, 4), (0, 0, 5)], [(0, 6, 5, 2)]),
        ([(0, 5), (2, 6)], [(0, 0, 5), (2, 0, 6)], [(0, 4, 5, 2), (0, 6, 6, 4)]),
        ([(0, 5)], [(0, 0, 5), (3, 0, 5)], [(0, 5, 5, 2), (0, 6, 5, 5)]),
        ([(0, 5)], [(0, 0, 5), (3, 0, 4), (3, 4, 5)], [(0, 5, 5, 2), (0, 4, 4, 4), (4, 6, 5, 5)]),
        ([(0, 5)], [(0, 0, 5), (4, 0, 6)], [(0, 6, 5, 2)]),
    ],
)
def test_passes_that_tags_claim(spans, prefills, expected):
    assert segments(tagged(spans, prefills)) == [Segment(*each) for each in expected]


def test_a_pass_token_by_token():
    assert Segment(0, 6, 5, 2).one_by_one() == [Segment(0, 3, 5, 2), *(Segment(n, n + 1, 5, n) for n in (3, 4, 5))]
    assert Segment(0, 4, 4, 4).one_by_one() == [Segment(0, 4, 4, 4)]


def test_a_prefill_that_leaves_a_gap_is_refused():
    with pytest.raises(TagError, match="prefill from position 6"):
        segments(tagged([(0, 5)], [(0, 0, 5), (3, 6, 5)]))


@pytest.mark.parametrize(
    ("name", "spans", "prefills"),
    [
        ("late", [(0, 1), (3, 2)], [(0, 0, 1)]),
        ("early", [(0, 1), (1, 2)], [(0, 0, 1)]),
        ("old", [(0, 1), (2, 1)], [(0, 0, 1)]),
        ("prefix", None, None),
    ],
)
def test_stories_about_tags(name, spans, prefills):
    rollout = tagged([(0, 1), (2, 2)], [(0, 0, 1)])
    told = by_name(name, 2).retag(rollout, previous_of([1, 2]))
    if spans is None:
        assert told is None, "the first version has none before it"
        return
    assert told.turn.token_versions == [VersionSpan(*each) for each in spans]
    assert told.turn.prefill_versions == [PrefillSpan(*each) for each in prefills]


def test_the_hypothesis_of_an_old_prefix():
    rollout = tagged([(0, 2)], [(0, 0, 2), (3, 0, 2)], prompt=9)
    told = by_name("prefix", 2).retag(rollout, previous_of([0, 2]))
    assert told.turn.prefill_versions == [PrefillSpan(0, 0, 0), PrefillSpan(0, 8, 2), PrefillSpan(3, 0, 2)]


def test_shifted_tags_leave_what_a_prefill_sampled():
    rollout = tagged([(0, 1), (2, 2)], [(0, 0, 1), (2, 0, 2)])
    assert by_name("late", 2).retag(rollout, {}) is None, "token 2 was sampled by the prefill that its tag names"


def estimates(truth, noise, tokens=2000, seed=0):
    source = np.random.default_rng(seed)
    tags = source.normal(-1, 0.5, tokens)
    alternative = tags + source.normal(0, 0.02, tokens)
    recorded = (alternative if truth else tags) + source.normal(0, noise, tokens)
    return estimate(recorded, tags, alternative, np.arange(tokens) // 10)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_the_slope_tells_which_hypothesis_is_true(noise):
    assert estimates(False, noise).verdict is Verdict.TAGS
    assert estimates(True, noise).verdict is Verdict.ALTERNATIVE


def test_too_much_noise_is_undecided_rather_than_wrong():
    assert estimates(True, 2.0).verdict is Verdict.UNDECIDED
    assert estimates(False, 0.01, tokens=40).verdict is Verdict.UNDECIDED, "four rollouts are too few"


def test_the_error_of_the_slope_is_honest():
    """Over many repetitions the estimate is about one standard error off."""
    found = [estimates(False, 0.05, tokens=600, seed=seed) for seed in range(200)]
    assert np.std([each.slope / each.error for each in found]) == pytest.approx(1.0, abs=0.15)


def test_an_estimate_that_hangs_on_a_few_rollouts_claims_no_more_than_they_can_say():
    """One rollout in twenty tells the hypotheses apart ten times better than the others: errors stay honest."""
    found = []
    for seed in range(300):
        source = np.random.default_rng(seed)
        rollout = np.arange(400) // 10
        difference = source.normal(0, 0.02, 400) * np.where(rollout % 20 == 0, 10, 1)
        noise = source.normal(0, 0.05, 400) + source.normal(0, 0.05, 40)[rollout]
        found.append(estimate(noise, np.zeros(400), difference, rollout))
    scores = np.array([each.slope / each.error for each in found if np.isfinite(each.error)])
    assert len(scores) > 100
    assert np.std(scores) < 1.25


def test_excess_compares_at_equal_confidence():
    """Improbable tokens miss more; a version with fewer of them does not look better, nor the other way round."""
    source = np.random.default_rng(0)

    def misses(scale, mean, factor=1.0):
        recorded = -np.abs(source.normal(mean, scale, 3000))
        return Misses(np.abs(source.normal(0, 0.02 * (0.2 - recorded) * factor)), recorded, np.arange(3000) // 15)

    baseline = misses(1.0, 1.5)
    sharper = excess(misses(0.6, 0.8), baseline)
    assert not sharper.suspicious
    assert sharper.ratio == pytest.approx(1.0, abs=0.1)
    broken = excess(misses(0.6, 0.8, factor=3.0), baseline)
    assert broken.suspicious
    assert broken.ratio == pytest.approx(3.0, abs=0.3)
