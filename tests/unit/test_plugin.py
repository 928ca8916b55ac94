"""The switch interval reaches a process by the environment, and nothing else does; warnings of ours are heard."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.generator import plugin


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Python's own, put back afterwards."""
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_nothing_is_set_that_was_not_asked_for(interval: float) -> None:
    plugin.register()
    assert sys.getswitchinterval() == interval


def test_a_generator_sets_it_for_itself_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(plugin.VARIABLE)
    monkeypatch.setenv("VLLM_USE_SPINLOOP_EXT", "0")  # a user's own
    plugin.hand_over_often()
    assert sys.getswitchinterval() == pytest.approx(plugin.INTERVAL_S)
    assert os.environ["VLLM_USE_SPINLOOP_EXT"] == "0"
    sys.setswitchinterval(0.005)
    plugin.register()  # as in a child
    assert sys.getswitchinterval() == pytest.approx(plugin.INTERVAL_S)


def test_a_users_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "0.002")
    monkeypatch.setenv("VLLM_USE_SPINLOOP_EXT", "1")
    plugin.hand_over_often()
    assert sys.getswitchinterval() == pytest.approx(0.002)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "2", "nan"])
def test_what_is_no_interval_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, interval: float) -> None:
    monkeypatch.setenv(plugin.VARIABLE, text)
    with pytest.raises(ValueError, match=f"INFLIGHT_SWITCH_INTERVAL={text} is not allowed"):
        plugin.register()
    assert sys.getswitchinterval() == interval


def test_warnings_are_heard_whatever_vllms_server_does_to_the_root_logger() -> None:
    code = """
import logging
import model_hosting_container_standards.sagemaker  # as vLLM's server does
from inflight.generator import plugin
assert logging.getLogger().level == logging.ERROR, "no longer needed"
plugin.register()
logging.getLogger("inflight.weights.receive.receiver").warning("version 2 failed in receive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert "version 2 failed in receive" in done.stderr


def test_vllm_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    point = importlib.metadata.EntryPoint(name, value, "vllm.general_plugins")
    assert point.load() is plugin.register
