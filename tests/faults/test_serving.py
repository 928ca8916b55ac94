"""What the tests with generators of a real vLLM wait for, with processes in their place that end or sleep."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from serving import Serving

from inflight.config import BusConfig, GeneratorConfig, ModelConfig, RunConfig, TaskConfig

pytestmark = pytest.mark.faults

SLEEPS = "import time; time.sleep(600)"
FAILS = "import no_such_module"


def serve(folder: Path, code: str) -> Serving:
    config = RunConfig(
        model=ModelConfig("tiny", dtype="float32"),
        task=TaskConfig("addition"),
        run_dir=str(folder / "run"),
        generator=GeneratorConfig(count=2),
        bus=BusConfig(heartbeat_s=0.3, dead_after_s=10),
    )
    return Serving(config, generator=["-c", code])


def test_nothing_is_waited_for_when_a_generator_has_ended_at_its_start(tmp_path):
    wanted = "g0 has ended with code 1: .*ModuleNotFoundError: No module named 'no_such_module'\ng1 has ended"
    with serve(tmp_path, FAILS) as serving:
        trainer = serving.trainer(0, "gloo")
        assert [process.wait(60) for process in serving.processes.values()] == [1, 1]
        began = time.monotonic()
        with pytest.raises(AssertionError, match=wanted):
            trainer.committed(g0=0)
        with pytest.raises(AssertionError, match=wanted):
            serving.url("g0")
    assert time.monotonic() - began < 30


def test_a_generator_that_was_killed_on_purpose_has_not_ended(tmp_path):
    with serve(tmp_path, SLEEPS) as serving:
        assert serving.ended() == ""
        serving.kill("g1")
        assert serving.ended() == ""
        serving.start("g1")
        serving.processes["g1"].kill()
        serving.processes["g1"].wait(20)
        assert serving.ended().startswith("g1 has ended with code -9: ")
