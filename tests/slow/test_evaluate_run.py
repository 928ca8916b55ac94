"""`inflight eval` with a real vLLM: a checkpoint's answers, tagged with its step."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.config import save
from inflight.launcher.compose import compose

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TIMEOUT_S = 600


def test_a_checkpoint_is_evaluated_alone_and_nothing_is_left(tmp_path, tiny_model):
    run_dir = tmp_path / "run"
    save(compose("tiny", [f"run_dir={run_dir}", "task.options.held_out=12", "eval.sampling.max_tokens=8"]))
    checkpoint = run_dir / "best" / "step-000007"
    shutil.copytree(Path(tiny_model), checkpoint)
    command = [sys.executable, "-m", "inflight.cli", "eval", str(run_dir), "--json"]
    sampled = ["eval.sampling.temperature=1", "eval.sampling.samples=2", "eval.pass_k=[1,2]"]
    done = subprocess.run([*command, *sampled], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting the generator … " in done.stderr
    result = json.loads(done.stdout)
    assert (result["checkpoint"], result["version"]) == (str(checkpoint), 7)
    assert (result["eval/questions"], result["eval/answers"]) == (12, 24)
    assert (result["eval/mixed"], result["eval/failed_by"]) == (0, {})
    assert result["eval/pass@1"] <= result["eval/pass@2"]
    assert 0 <= result["eval/reward"] <= 1
