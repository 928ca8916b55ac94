"""What a user has set: kept apart from defaults, refused without effect, and alone in changing a resumed run."""

from __future__ import annotations

import dataclasses
import operator
import re

import pytest

from inflight import config as configuration
from inflight.config import AdvantageConfig, ConfigError
from inflight.config.effect import IDLE, require_effect
from inflight.config.lora import LoraConfig
from inflight.config.pairings import LEARNS_LITTLE, require_sound, warnings, warnings_of_data
from inflight.launcher import launch as launching
from inflight.launcher.compose import compose
from inflight.launcher.differences import of_options, of_task, refuse
from inflight.launcher.resume import resumed_config, set_anew
from inflight.models import prepare
from inflight.trainer.loss import make_loss
from inflight.trainer.objectives import OBJECTIVES

MINE = """
defaults: [tiny, {override machine: odd}, _self_]
trainer: {steps: 6, objective: {options: {cap: 3.0}}}
"""
ODD = "# @package _global_\ngenerator: {threads: 2}\n"


@pytest.fixture
def own(tmp_path):
    """A folder of the user's own, with a group of files in it."""
    folder = tmp_path / "configs"
    (folder / "machine").mkdir(parents=True)
    (folder / "mine.yaml").write_text(MINE)
    (folder / "machine" / "odd.yaml").write_text(ODD)
    return folder


def test_what_is_set_on_the_command_line_is_chosen_and_what_comes_with_the_package_is_not(tmp_path):
    asked = [
        "machine=cpu",
        f"run_dir={tmp_path}",
        "trainer.steps=7",
        "task.options={high: 3}",
        "gate.rules=[]",
        "++seed=1",
    ]
    assert compose("tiny", asked).chosen == ["gate.rules", "run_dir", "seed", "task.options.high", "trainer.steps"]
    assert compose("tiny").chosen == []


def test_so_is_what_stands_in_files_of_the_users_own(tmp_path, own):
    run = compose("mine", ["seed=1"], own)
    assert run.chosen == ["generator.threads", "seed", "trainer.objective.options.cap", "trainer.steps"]


def test_the_processes_get_it_and_it_can_not_be_set(tmp_path):
    run = compose("tiny", [f"run_dir={tmp_path}", "trainer.steps=7"])
    configuration.save(run)
    assert configuration.load(tmp_path) == run
    with pytest.raises(ConfigError, match=r"chosen=.* is not allowed"):
        compose("tiny", ["chosen=[seed]"])


@pytest.fixture(scope="module")
def tiny():
    return compose("tiny")


def changed(run, **sections):
    """`run` with fields of its sections replaced."""
    return dataclasses.replace(
        run, **{name: dataclasses.replace(getattr(run, name), **fields) for name, fields in sections.items()}
    )


@pytest.mark.parametrize("idle", IDLE, ids=lambda idle: idle.names)
def test_every_value_that_can_be_idle_exists_and_is_refused_when_it_was_set(tiny, idle):
    for name in idle.names.split():
        run = dataclasses.replace(changed(tiny, **idle_with(idle)), chosen=[name])
        operator.attrgetter(name)(run)
        with pytest.raises(ConfigError, match=f"{name} is set and has no effect: {idle.because}"):
            require_effect(run)
        require_effect(dataclasses.replace(run, chosen=[]))
        require_effect(dataclasses.replace(run, chosen=None))


def idle_with(idle):
    other = {
        "gate.max_token_lag gate.on_stale gate.stale_retries": {
            "trainer": {"synchronous": True},
            "gate": {"max_lag": 0},
        },
        "audit.keep_versions": {"rollout": {"repetition_penalty": 1.1}},
        "generator.share_prefix_across_versions rollout.together_from_tokens": {
            "generator": {"prefix_caching": False, "count": 2},
        },
        "rollout.file_mib": {"rollout": {"keep": False}},
        "generator.swap": {"trainer": {"lora": LoraConfig(rank=8)}},
        "trainer.micro_batch": {"trainer": {"micro_batch_tokens": 256}},
        "eval.best_by": {"eval": {"every": 3, "keep_best": False}},
        "gate.stale_retries": {"gate": {"on_stale": "drop"}},
        "launch.restart_delay_s": {"launch": {"restarts": 0}},
        "bus.address": {"network": {"bind": "127.0.0.1"}},
    }
    return other.get(idle.names, {})


CLIPPED_UPDATE = ("decoupled_ppo", "tis", "tis_sequence", "masked_is", "icepop", "sequence_mask", "geometric_mask")


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_options_that_bound_an_update_need_more_than_one(tiny, name):
    def check(options, **updates):
        objective = configuration.ObjectiveConfig(name=name, options=options)
        make_loss(changed(tiny, trainer={"objective": objective, **updates}))

    check({})
    if name not in CLIPPED_UPDATE:
        return
    for option in ("clip_low", "clip_high"):
        with pytest.raises(ConfigError, match=rf"trainer\.objective\.options\.{option} is set and has no effect"):
            check({option: 0.2})
        check({option: 0.2}, updates_per_batch=2)
        check({option: 0.2}, epochs_per_batch=2)
    if name == "decoupled_ppo":
        check({"clip_high": 0.2, "proximal_by": "interpolated"})


# --- pairings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.6},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_a_teacher_is_refused_where_it_would_differ_from_a_student_that_is_the_same(tiny, changes):
    ((name, value),) = changes.items()
    asked = {"advantage": AdvantageConfig(name="distillation")}
    against = {"objective": configuration.ObjectiveConfig(kl=0.1, kl_reference="teacher")}
    for trainer, what in ((asked, "advantage.name=distillation"), (against, "objective.kl_reference=teacher")):
        with pytest.raises(ConfigError, match=rf"rollout\.{name}={value} is not allowed with trainer\.{what}"):
            require_sound(changed(tiny, trainer=trainer, rollout=changes))
        require_sound(changed(tiny, trainer=trainer))
    require_sound(changed(tiny, rollout=changes))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_trainer_computes_in_what_the_generators_compute_in(tiny, dtype):
    for autocast in (False, True):
        require_sound(changed(tiny, model={"dtype": "bfloat16"}, trainer={"autocast": autocast}))
    with pytest.raises(ConfigError, match=f"trainer.autocast=true is not allowed with model.dtype={dtype}"):
        require_sound(changed(tiny, model={"dtype": dtype}, trainer={"autocast": True}))
    require_sound(changed(tiny, model={"dtype": dtype}, trainer={"autocast": False}))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_what_learns_little_by_our_own_data_is_warned_of(tiny, name):
    for depth in (0, 1, 4):
        objective = configuration.ObjectiveConfig(name=name)
        lines = list(warnings(changed(tiny, trainer={"objective": objective}, gate={"max_lag": depth})))
        assert len(lines) == (name in LEARNS_LITTLE and depth > 0)
        assert all(line.startswith(f"trainer.objective.name={name} clips") and "\n" not in line for line in lines)


def test_nor_are_the_defaults_however_deep(tiny):
    objective, gate = configuration.ObjectiveConfig(), configuration.GateConfig()
    for depth in (gate.max_lag, 9):
        run = changed(dataclasses.replace(tiny, gate=gate), trainer={"objective": objective}, gate={"max_lag": depth})
        assert list(warnings(run)) == []


def test_nothing_that_is_shipped_is_warned_of():
    for shipped in ("tiny", "demo", "demo_gpu"):
        assert list(warnings(compose(shipped))) == []


def test_the_pairing_is_warned_of_in_one_line_and_the_run_continues(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launching, "usual_commands", lambda config: [])
    monkeypatch.setattr(launching, "_run", lambda *_: (launching.RunOutcome(), []))
    asked = ["trainer.objective.name=grpo", "gate.max_lag=2"]
    assert launching.main(["--config-name", "tiny", f"run_dir={tmp_path}/run", *asked]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "grpo" in line]
    assert line.startswith("inflight launch: trainer.objective.name=grpo clips against the behaviour policy")


def scheduled(tiny, name, warmup_steps):
    """1000 steps of 4 questions each, of data that are asked twice."""
    schedule = dataclasses.replace(tiny.trainer.schedule, name=name)
    trainer = {"steps": 1000, "groups_per_step": 4, "warmup_steps": warmup_steps, "schedule": schedule}
    return changed(tiny, trainer=trainer, task={"epochs": 2})


LONGER, DECAYS = "trainer.warmup_steps=100 is longer", "trainer.schedule.name=cosine decays over all 1000"


@pytest.mark.parametrize(
    ("name", "warmup", "questions", "late"),
    [
        ("cosine", 100, 114, f"{LONGER} and {DECAYS}: choose them by the data"),
        ("cosine", 28, 114, f"{DECAYS}: choose it by the data"),
        ("constant", 100, 114, f"{LONGER}: choose it by the data"),
        ("inverse_sqrt", 100, 114, f"{LONGER}: choose it by the data"),
        ("constant", 28, 114, ""),
        ("inverse_sqrt", 28, 114, ""),
        ("cosine", 100, 4000, ""),
        ("cosine", 100, None, ""),
    ],
)
def test_a_schedule_that_is_longer_than_the_data_is_warned_of(tiny, name, warmup, questions, late):
    first = (
        "the data are enough for 28 of trainer.steps=1000 (114 questions over task.epochs=2, trainer.groups_per_step=4)"
    )
    assert list(warnings_of_data(scheduled(tiny, name, warmup), questions, 0)) == (
        [f"{first}, and {late}"] if late else []
    )


def test_a_warm_up_that_is_longer_than_the_run_is_warned_of(tiny):
    run = changed(tiny, trainer={"steps": 20, "warmup_steps": 100, "learning_rate": 1e-6})
    says = "trainer.warmup_steps=100 is more than trainer.steps=20: the learning rate ends at 0.2 of"
    assert list(warnings(run)) == [f"{says} trainer.learning_rate=1e-06"]
    assert list(warnings_of_data(run, 4, 0)) == [], "said once"
    assert list(warnings(changed(run, trainer={"warmup_steps": 20}))) == []


@pytest.mark.parametrize(
    ("task", "evaluated", "source"),
    [
        ({"name": "addition", "options": {"held_out": 3}}, {}, "asks 3 questions (task.options.held_out=3)"),
        ({"name": "addition", "options": {"held_out": 90}}, {"questions": 1}, "asks 1 question (eval.questions=1)"),
        ({"name": "addition", "options": {"held_out": 30}}, {}, ""),
        ({"name": "addition", "options": {"held_out": 3}}, {"every": 0}, ""),
        ({"name": "my.tasks:Mine", "options": {"held_out": 3}}, {}, ""),
        ({"name": "dataset", "options": {"held_out": 0.05}}, {}, ""),
    ],
)
def test_an_evaluation_of_few_questions_is_warned_of(tiny, task, evaluated, source):
    lines = list(warnings(changed(tiny, task=task, eval={"every": 5} | evaluated)))
    assert [line.startswith(f"an evaluation {source}, fewer than 30: ") for line in lines] == [True] * bool(source)


@pytest.mark.parametrize(
    ("options", "evaluated", "held_out", "source"),
    [
        ({"held_out": 0.05}, {}, 3, "task.options.held_out=0.05"),
        ({"held_out_path": "h.jsonl"}, {}, 29, "task.options.held_out_path=h.jsonl"),
        ({}, {}, 29, "task.name=dataset"),
        ({"held_out": 0.5}, {}, 30, ""),
        ({"held_out": 0.05}, {"every": 0}, 3, ""),
        ({"held_out": 0.05}, {"questions": 2}, 3, ""),  # said by `warnings`
    ],
)
def test_so_is_one_of_few_rows(tiny, options, evaluated, held_out, source):
    run = changed(tiny, task={"name": "dataset", "options": options}, eval={"every": 5} | evaluated)
    lines = list(warnings_of_data(run, None, held_out))
    assert [line.startswith(f"an evaluation asks {held_out} questions ({source})") for line in lines] == [True] * bool(
        source
    )


# --- a resumed run ------------------------------------------------------------------------------------------------


def begun(tmp_path, **changes):
    """A run whose configuration was written when defaults were others."""
    run = compose("tiny", [f"run_dir={tmp_path}/run", "trainer.steps=8"])
    model = {"name": str(prepare("tiny"))}
    configuration.save(changed(run, trainer=changes, model=model))
    return configuration.load(tmp_path / "run")


def test_a_resumed_run_keeps_its_values_though_a_default_has_changed(tmp_path):
    before = begun(tmp_path, learning_rate=5.0, objective=configuration.ObjectiveConfig(name="ppo"))
    now = resumed_config(compose("tiny", [f"run_dir={tmp_path}/run", "resume=true"]))
    assert now == dataclasses.replace(before, resume=True, chosen=["run_dir", "trainer.steps"])
    assert (now.trainer.learning_rate, now.trainer.objective.name, now.trainer.steps) == (5.0, "ppo", 8)
    assert now.resume
    assert set_anew(now) == []


def test_values_that_are_set_again_are_used_and_shown(tmp_path):
    begun(tmp_path, learning_rate=5.0)
    asked = ["trainer.steps=12", "gate.rules=[{name: uniform_rewards}]", "trainer.objective.options.cap=3.0"]
    now = resumed_config(compose("tiny", [f"run_dir={tmp_path}/run", "resume=true", *asked]))
    assert (now.trainer.steps, now.trainer.learning_rate) == (12, 5.0)
    assert now.gate.rules == [{"name": "uniform_rewards"}]
    assert now.trainer.objective.options == {"cap": 3.0}
    assert set(set_anew(now)) == {
        "trainer.steps=12",
        "gate.rules=[{'name': 'uniform_rewards'}]",
        "trainer.objective.options.cap=3.0",
    }
    configuration.save(now)
    again = resumed_config(compose("tiny", [f"run_dir={tmp_path}/run", "resume=true", "trainer.objective.options={}"]))
    assert (again.trainer.steps, again.trainer.objective.options) == (12, {}), "kept; an option can be taken back"


def test_so_is_an_edit_of_the_users_own_file(tmp_path, own):
    configuration.save(compose("mine", [f"run_dir={tmp_path}/run"], own))
    (own / "mine.yaml").write_text(MINE.replace("steps: 6", "steps: 9"))
    now = resumed_config(compose("mine", [f"run_dir={tmp_path}/run", "resume=true"], own))
    assert now.trainer.steps == 9
    assert set_anew(now) == ["trainer.steps=9"]


def test_what_may_not_change_is_refused_by_name(tmp_path, capsys):
    begun(tmp_path)
    for asked, says in (
        (["--config-name", "demo"], "task.name='progression' is not allowed: the run in .* began with 'addition'"),
        (["--config-name", "tiny", "seed=3"], "seed=3 is not allowed: the run in .* began with 0"),
        (["--config-name", "tiny", "rollout.temperature=0.5"], "rollout.temperature=0.5 is not allowed"),
    ):
        assert launching.main([*asked, f"run_dir={tmp_path}/run", "resume=true"]) == 2
        assert re.search(says, capsys.readouterr().err)


def test_all_that_may_not_change_is_named_at_once(tmp_path, capsys):
    """One difference per attempt would take as many attempts, each of which repeats the checks."""
    begun(tmp_path)
    asked = ["--config-name", "tiny", f"run_dir={tmp_path}/run", "resume=true"]
    assert launching.main([*asked, "seed=3", "rollout.group_size=2", "task.epochs=5"]) == 2
    began = f"task.epochs=5 is not allowed: the run in {tmp_path}/run began with 1; seed=3 is not allowed: it began"
    others = "with 0; rollout.group_size=2 is not allowed: it began with 4"
    no_step = "; it has no step: choose another run_dir or delete it"
    assert capsys.readouterr().err.splitlines()[-1] == f"inflight launch: {began} {others}{no_step}"
    assert launching.main([*asked, "task.name=progression", "model.name=owner/other", "seed=3"]) == 2
    task = f"task.name='progression' is not allowed: the run in {tmp_path}/run began with 'addition'"
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"inflight launch: {task}; model.name=owner/other is not allowed: it began with ")
    assert error.endswith(f"; seed=3 is not allowed: it began with 0{no_step}")


@pytest.mark.parametrize("rank", [0, 4])
def test_more_epochs_are_refused_with_a_way_to_have_them(tmp_path, rank):
    """A directory of an adapter is no model."""
    run = compose("tiny", [f"run_dir={tmp_path}/run"])
    run = changed(run, trainer={"lora": dataclasses.replace(run.trainer.lora, rank=rank)})
    configuration.save(run)
    checkpoint = run.path / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    longer = changed(run, task={"epochs": 2})
    with pytest.raises(ConfigError) as caught:
        refuse(run, [*of_task(run, longer), *of_options(run, longer)])
    way = "" if rank else f"; model.name={checkpoint} begins another run with its weights"
    assert str(caught.value) == f"task.epochs=2 is not allowed: the run in {run.path} began with 1{way}"


def test_another_model_of_the_hub_is_refused_at_a_resume_before_it_is_downloaded(tmp_path, own, monkeypatch, capsys):
    """As when the options of the start are left out and the user's file names another model."""
    (own / "mine.yaml").write_text(MINE + "model: {name: owner/other}\n")
    start = [f"run_dir={tmp_path}/run", "model.name=tiny"]
    run = compose("mine", start, own)
    configuration.save(changed(run, model={"name": str(prepare("tiny")), "served_name": "tiny"}))
    downloads = []
    monkeypatch.setattr("inflight.models.hub.fetch", lambda *asked, **_: downloads.append(asked))
    asked = ["--config-dir", str(own), "--config-name", "mine", f"run_dir={tmp_path}/run", "resume=true"]
    assert launching.main(asked) == 2
    assert capsys.readouterr().err == (
        f"inflight launch: model.name=owner/other is not allowed: the run in {tmp_path}/run began with tiny; resume it "
        "with the options of its start; it has no step: choose another run_dir or delete it\n"
    )
    assert downloads == []
    assert resumed_config(compose("mine", [*start, "resume=true"], own)).model.name == "tiny"


def test_a_configuration_made_in_python_is_taken_as_it_is(tmp_path):
    before = begun(tmp_path)
    asked = dataclasses.replace(before, resume=True, chosen=None, trainer=dataclasses.replace(before.trainer, steps=99))
    assert resumed_config(asked) is asked


@pytest.mark.parametrize("why", [{"rollout": {"keep": False}}, {"model": {"trust_remote_code": True}}])
def test_versions_that_no_audit_can_use_are_not_kept_on_request(tiny, why):
    run = dataclasses.replace(changed(tiny, **why), chosen=["audit.keep_versions"])
    with pytest.raises(ConfigError, match=r"audit\.keep_versions is set and has no effect: an audit needs"):
        require_effect(run)
    require_effect(changed(run, audit={"keep_versions": False}))
