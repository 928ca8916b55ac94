"""A run's figures in trackers: TensorBoard's own files, and services that fail or hang."""

import dataclasses
import threading

import pytest
from fake_generator import eventually
from rollout_samples import make_config

from inflight.config import ConfigError
from inflight.config.trackers import TRACKERS, require_installed
from inflight.trainer import trackers as module
from inflight.trainer.trackers import TRACKERS_FOLDER, Trackers, numbers

LINE = {
    "step": 3,
    "reward": 0.5,
    "loss": float("nan"),
    "agrees": True,
    "committed": {"g0": 3},
    "by_lag": {"0": {"kl": 0.25}},
    "questions": [1, 2],
    "dropped": {"q1": "stale"},
    "phase": "training",
    "nothing": None,
}


def test_numbers_of_a_line_have_the_names_of_the_line():
    found = dict(numbers(LINE))
    assert str(found.pop("loss")) == "nan"
    assert found == {"step": 3, "reward": 0.5, "agrees": 1, "committed/g0": 3, "by_lag/0/kl": 0.25}


def config_of(folder, *names):
    return dataclasses.replace(make_config(folder), trackers=list(names))


def test_tensorboard_gets_the_figures_of_each_line_at_its_step(tmp_path):
    from accelerate import Accelerator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings, config = [], config_of(tmp_path, "tensorboard")
    accelerator = Accelerator(cpu=True, log_with=config.trackers, project_dir=tmp_path / TRACKERS_FOLDER)
    shown = Trackers(config, accelerator, warnings.append)
    shown.log(3, LINE)
    shown.log(6, {"step": 6, "reward": 0.75, "eval/pass@1": 0.25})
    shown.close()
    shown.close()
    assert warnings == []
    events = EventAccumulator(str(tmp_path / TRACKERS_FOLDER / "inflight"))
    events.Reload()
    told = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert told["reward"] == [(3, 0.5), (6, 0.75)]
    assert told["by_lag/0/kl"] == [(3, 0.25)]
    assert told["eval/pass@1"] == [(6, 0.25)]


class Service:
    """In place of accelerate: notes what it gets, or fails, or hangs."""

    def __init__(self, fail="", hang=None):
        self.got, self.fail, self.hang = [], fail, hang
        self.began = threading.Event()

    def init_trackers(self, project_name, config, init_kwargs):
        self.project, self.settings, self.named = project_name, config, init_kwargs
        if self.fail == "init":
            raise RuntimeError("not\nlogged in")

    def log(self, values, step):
        self.began.set()
        if self.hang is not None:
            self.hang.wait(30)
        if self.fail == "log":
            raise ConnectionError("gone")
        self.got.append((step, values))

    def end_training(self):
        self.got.append("ended")


@pytest.mark.parametrize(("fail", "says"), [("init", "not logged in"), ("log", "gone")])
def test_a_tracker_that_fails_is_told_once_and_ends_no_run(tmp_path, fail, says):
    warnings, service = [], Service(fail)
    shown = Trackers(config_of(tmp_path, "wandb", "mlflow"), service, warnings.append)
    for step in range(5):
        shown.log(step, LINE)
    eventually(lambda: bool(warnings))
    shown.log(9, LINE)
    shown.close()
    assert warnings == [f"trackers=wandb,mlflow: {says}; the run continues without"]
    assert service.got == []
    assert service.named["wandb"]["name"] == service.named["mlflow"]["run_name"] == tmp_path.name
    assert service.settings["trainer.steps"] == make_config(tmp_path).trainer.steps


def test_a_tracker_that_hangs_holds_up_no_step_and_no_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    monkeypatch.setattr(module, "WAITING", 2)
    released = threading.Event()
    service = Service(hang=released)
    shown = Trackers(config_of(tmp_path, "wandb"), service, lambda line: None)
    shown.log(0, LINE)
    assert service.began.wait(20)
    for step in range(1, 5):
        shown.log(step, LINE)  # two of them find no room
    shown.close()
    assert "the trackers do not end within" in caplog.text
    assert "the trackers were too slow for 2 lines" in caplog.text
    released.set()


def test_trackers_that_do_not_exist_or_are_not_installed_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="trackers='comet' is not allowed: tensorboard, wandb, mlflow"):
        config_of(tmp_path, "comet")
    with pytest.raises(ConfigError, match="each of them once"):
        config_of(tmp_path, "wandb", "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    require_installed(["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match=r"trackers=mlflow is not installed: pip install 'inflight\[mlflow\]'"):
        require_installed(TRACKERS)
