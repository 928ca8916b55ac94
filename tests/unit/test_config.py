"""Configurations: composing, refusing, saving and loading."""

from __future__ import annotations

import dataclasses
import re

import pytest

from inflight import config
from inflight.config import (
    BusConfig,
    ConfigError,
    GateConfig,
    GeneratorConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    TrainerConfig,
)
from inflight.launcher.compose import compose
from inflight.resources import folder

SHIPPED = sorted(path.stem for path in folder("configs").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("machine", sorted(path.stem for path in (folder("configs") / "machine").glob("*.yaml")))
def test_every_shipped_configuration_composes_and_survives_the_run_folder(tmp_path, name, machine):
    run = compose(name, [f"machine={machine}", f"run_dir={tmp_path}"])
    config.save(run)
    assert config.load(tmp_path) == run


def test_free_keys_survive_the_run_folder(tmp_path):
    asked = ["launch.affinity={trainer: [1], g0: [0]}", "task.options.low=3", "generator.extra={a: {b: [1]}}"]
    run = compose("tiny", [f"run_dir={tmp_path}", *asked])
    config.save(run)
    loaded = config.load(tmp_path)
    assert loaded.launch.affinity == {"trainer": [1], "g0": [0]}
    assert loaded.task.options == {"low": 3}
    assert loaded.generator.extra == {"a": {"b": [1]}}


def test_run_dir_is_absolute_and_named_after_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = compose("tiny")
    assert run.path.is_absolute()
    assert run.path.parent == tmp_path / "runs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-tiny", run.path.name)


@pytest.mark.parametrize(
    "override, words",
    [
        ("trainer.stepz=3", "stepz"),
        ("nonsense=1", "nonsense"),
        ("trainer.steps=abc", r"^trainer\.steps=abc is not allowed: a whole number is needed$"),
        ("+generator={count: abc}", r"is not allowed: a whole number is needed for generator\.count=abc$"),
        ("rewards=[{name: math, weight: x}]", r"weight: x}\] is not allowed: a number is needed for weight=x$"),
        ("trainer.learning_rate=fast", r"^trainer\.learning_rate=fast is not allowed: a number is needed$"),
        ("trainer.synchronous=so", r"^trainer\.synchronous=so is not allowed: true or false is needed$"),
        ("generator.count=null", r"^generator\.count=null is not allowed: a value is needed, not null$"),
        ("gate.rules=5", r"^gate\.rules=5 is not allowed: a list is needed$"),
        ("model.name=[1]", r"^model\.name=\[1\] is not allowed: a text is needed$"),
        ("trainer.lora=5", r"^trainer\.lora=5 is not allowed: options by name are needed, \{NAME: VALUE, …\}$"),
        ("launch.line_every_s=0.9", r"launch\.line_every_s=0\.9 is not allowed: 1 or more"),
        ("launch.log_mib=0.5", r"launch\.log_mib=0\.5 is not allowed: 1 or more"),
        ("launch.log_mib=1e12", r"launch\.log_mib=1000000000000\.0 is not allowed: at most 1000000000"),
        ("trainer.steps=0", r"trainer\.steps=0 is not allowed: 1 or more"),
        ("trainer.stesp=3", r"^trainer\.stesp is not known; did you mean trainer\.steps\?$"),
        ("trainer.objective.nme=x", r"did you mean trainer\.objective\.name\?$"),
        ("audit.why=1", r"^audit\.why is not known; known: keep_versions$"),
        ("rollout.min_tokens=2", r"^rollout\.min_tokens is not an option: vLLM excludes the end tokens .* `length`$"),
        ("rollout.bad_words=[a]", r"^rollout\.bad_words is not an option: .*; the log-probabilities that vLLM records"),
        ("machin=cpu", r"^machin is not known; did you mean machine\?$"),
        ("machine=toaster", r"machine/toaster'; there are: cpu, gpu$"),
        ("run_dir=", "run_dir='' is not allowed: a folder"),
        ("trainer.steps=[", "can't read"),
        ("trainer", "can't read 'trainer': it takes KEY=VALUE$"),
        ("=3", "can't read =3"),
        ("+trainer.foo=1", r"'foo', in \+trainer\.foo=1"),
        ("trainer.steps=10000000000", r"trainer\.steps=10000000000 is not allowed: at most 1000000000"),
        ("generator.count=1000000", "at most 1024"),
        ("checkpoint=step-000040", "checkpoint='step-000040' is not allowed: the launcher finds it"),
    ],
)
def test_a_bad_override_is_reported_in_one_line(override, words):
    with pytest.raises(ConfigError, match=words) as error:
        compose("tiny", [override])
    assert "\n" not in str(error.value)


ENTRIES = ["rewards.1.weight=0.5", "+rewards.1.weight=0.5", "rewards[1].weight=0.5", "~rewards.0"]


@pytest.mark.parametrize("override", [*ENTRIES, "rollout.stop_token_ids.0=5"])
def test_an_override_of_one_entry_of_a_list_is_refused_with_one_that_is_taken(override):
    with pytest.raises(ConfigError) as refused:
        compose("dataset", [override])
    said = str(refused.value)
    name = "rewards" if "rewards" in override else "rollout.stop_token_ids"
    assert said.startswith(f"{override} is not allowed: entries of {name} can't be set singly; give the whole list, '")
    if name == "rewards":
        instead = said.partition(" '")[2].partition("'")[0]
        weights = [(each.name, each.weight) for each in compose("dataset", [instead]).rewards]
        assert weights == [("numeric_match", 1.0), ("my_rewards.py:short", 0.5)]


def test_an_unknown_configuration_is_reported_in_one_line():
    with pytest.raises(ConfigError, match=f"'nope'; the configurations are: {', '.join(SHIPPED)}$") as error:
        compose("nope")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("files, listed", [(["mine"], "mine"), ([], "none")])
def test_a_users_folder_is_searched_alone_and_its_configurations_are_listed(tmp_path, files, listed):
    for file in files:
        (tmp_path / f"{file}.yaml").write_text("defaults:\n  - tiny\n")
    said = f"'demo' in {tmp_path}; the configurations are: {listed}; without --config-dir: {', '.join(SHIPPED)}"
    with pytest.raises(ConfigError, match=re.escape(said) + "$"):
        compose("demo", [], tmp_path)


def test_a_folder_of_configurations_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"--config-dir {tmp_path}/none: there is no such folder")):
        compose("tiny", [], tmp_path / "none")


@pytest.mark.parametrize(
    "given, words",
    [
        ("{stesp: 2}", r"^In 'mine': trainer\.stesp is not known; did you mean trainer\.steps\?$"),
        ("{steps: two}", r"^In 'mine': trainer\.steps=two is not allowed: a whole number is needed$"),
        ("5", "^In 'mine' .*int is not a subclass of TrainerConfig"),
        (
            "{steps: 2}\nmachine: cpu",
            r"^In 'mine': machine is not set by a key: name it in the file's defaults, `- machine: NAME`, or on the "
            r"command line, machine=NAME; there are: cpu, gpu$",
        ),
    ],
)
def test_an_error_in_a_file_is_reported(tmp_path, given, words):
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - tiny\n  - _self_\ntrainer: {given}\n")
    with pytest.raises(ConfigError, match=words):
        compose("mine", [], tmp_path)


def test_own_folder_builds_on_the_shipped_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - tiny\n  - _self_\ntrainer:\n  steps: 2\n")
    run = compose("mine", [], tmp_path)
    assert run.trainer.steps == 2
    assert run.model.name == "tiny"


def test_a_configuration_without_schema_is_refused(tmp_path):
    (tmp_path / "bare.yaml").write_text("model: {name: tiny}\n")
    with pytest.raises(ConfigError, match="schema"):
        compose("bare", [], tmp_path)


@pytest.mark.parametrize("content", [b"defaults: [tiny\n x", b"\xff\xfe"])
def test_a_file_that_is_not_yaml_is_reported_in_one_line(tmp_path, content):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"mine\.yaml.* is not YAML: ") as error:
        compose("mine", [], tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / config.CONFIG_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=config.CONFIG_FILE):
        config.load(tmp_path)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda text: text + "extra: 1\n", "extra"),
        (lambda text: text.replace("group_size: 4", "group_size: four"), "rollout.group_size"),
        (lambda text: text.replace("  name: tiny\n", ""), "name"),
        (lambda text: "a: [", "flow"),
        (lambda text: "- 1", "ListConfig"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, words):
    config.save(compose("tiny", [f"run_dir={tmp_path}"]))
    file = tmp_path / config.CONFIG_FILE
    file.write_text(damage(file.read_text()))
    with pytest.raises(ConfigError, match=words) as error:
        config.load(tmp_path)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        config.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a run folder"):
        config.load(tmp_path / "file")


@pytest.mark.parametrize(
    "kind, values",
    [
        (ModelConfig, {"name": "tiny", "dtype": "int8"}),
        (GeneratorConfig, {"count": 0}),
        (GeneratorConfig, {"swap": "magic"}),
        (RolloutConfig, {"group_size": 1}),
        (RolloutConfig, {"group_size": 4097}),
        (RolloutConfig, {"temperature": 0}),
        (RolloutConfig, {"temperature": 0.009}),  # vLLM would draw at 0.01
        (RolloutConfig, {"top_k": 1 << 31}),
        (GateConfig, {"max_lag": -1}),
        (GateConfig, {"max_token_lag": 1 << 70}),
        (GateConfig, {"min_trained_share": 1.5}),
        (TrainerConfig, {"micro_batch": 0}),
        *((ObjectiveConfig, {name: "x"}) for name in ("normalise", "kl_estimator", "kl_reference")),
        *((ObjectiveConfig, {name: -0.1}) for name in ("kl", "entropy")),
        (BusConfig, {"heartbeat_s": 2.0, "dead_after_s": 1.0}),
        (BusConfig, {"dead_after_s": float("inf")}),
        (BusConfig, {"heartbeat_s": 0.0}),
        (TrainerConfig, {"batch_timeout_s": 1e10}),  # what a thread can't wait for
        (config.PublishConfig, {"transport": "pigeon"}),
        *((config.PublishConfig, {"bucket_bytes": size}) for size in (1, 1 << 64)),
        (config.LaunchConfig, {"stop_grace_s": 60}),
        *((GeneratorConfig, {name: 0}) for name in ("tensor_parallel_size", "max_model_len", "max_num_seqs")),
        (GeneratorConfig, {"threads": 0}),
        *((GeneratorConfig, {name: -1.0}) for name in ("kv_cache_gib", "start_timeout_s")),
        *((RolloutConfig, {name: 0}) for name in ("max_tokens", "concurrency", "token_timeout_s", "top_p")),
        (RolloutConfig, {"reward_timeout_s": float("inf")}),
        (RolloutConfig, {"temperature": float("nan")}),
        (RolloutConfig, {"top_k": -1}),
        *((TrainerConfig, {name: 0}) for name in ("threads", "grad_clip", "batch_timeout_s")),
        *((TrainerConfig, {name: -1}) for name in ("learning_rate", "warmup_steps", "checkpoint_every")),
        *((config.PublishConfig, {f"{name}_timeout_s": 0}) for name in ("join", "transfer", "commit")),
    ],
)
def test_a_bad_value_is_refused_where_it_is_made(kind, values):
    with pytest.raises(ConfigError, match="is not allowed"):
        kind(**values)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_must_be_one_for_all_generators_of_random_numbers(seed):
    with pytest.raises(ConfigError, match=rf"seed={seed} is not allowed"):
        compose("tiny", [f"seed={seed}"])


def test_an_answer_must_fit_into_the_context():
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens=256 .* 255 or less"):
        compose("tiny", ["rollout.max_tokens=256", "generator.max_model_len=256"])


def test_a_prompt_must_leave_room_for_a_token():
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens=256 .* 255 or less"):
        compose("tiny", ["rollout.max_prompt_tokens=256", "generator.max_model_len=256"])
    assert compose("tiny", ["generator.max_model_len=256"]).longest_prompt == 255
    assert compose("tiny", ["rollout.max_prompt_tokens=40", "generator.max_model_len=256"]).longest_prompt == 40


def test_the_longest_sequence_must_fit_into_a_micro_batch():
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens=255 is not allowed: 0, or 256 \("):
        compose("tiny", ["trainer.micro_batch_tokens=255", "generator.max_model_len=256"])
    assert compose("tiny", ["trainer.micro_batch_tokens=256"]).trainer.micro_batch_tokens == 256


def test_a_synchronous_run_looks_no_step_ahead():
    with pytest.raises(ConfigError, match=r"gate\.max_lag=2 is not allowed: 0 with trainer\.synchronous"):
        compose("tiny", ["trainer.synchronous=true"])
    assert compose("tiny", ["trainer.synchronous=true", "gate.max_lag=0"]).trainer.synchronous


def test_capacity_follows_from_lag_and_step():
    run = compose("tiny", ["gate.max_lag=2", "trainer.groups_per_step=3"])
    assert run.capacity == 9
    assert dataclasses.replace(run, generator=GeneratorConfig(count=2)).generator_names() == ["g0", "g1"]


def test_a_bus_folder_elsewhere_shortens_the_endpoint(tmp_path):
    deep = tmp_path / ("x" * 80)
    short = tmp_path / "s"
    deep.mkdir()
    short.mkdir()
    (deep / "bus").symlink_to(short)
    assert compose("tiny", [f"run_dir={deep}"]).endpoint("status") == f"ipc://{short}/status"
