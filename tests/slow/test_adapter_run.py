"""A whole run that trains an adapter, with a real vLLM on CPU: it is audited, resumed, and loaded by PEFT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inflight.metrics import METRICS_FILE, read_lines
from inflight.models import prepare

patch = pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(patch.PATCH_VERSION < 2, reason="needs a newer patch of vLLM: inflight patch apply"),
]


def launch(run_dir: Path, *overrides: str) -> str:
    command = [
        sys.executable,
        "-m",
        "inflight.launcher",
        "--config-name",
        "tiny",
        f"run_dir={run_dir}",
        "publish.join_timeout_s=400",
        "generator.start_timeout_s=400",
        "trainer.lora.rank=8",
        "trainer.lora.alpha=20",
        "trainer.learning_rate=0.003",
        "trainer.objective.kl=0.01",
        *overrides,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def test_a_run_trains_an_adapter_which_the_audit_confirms_and_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_dir = tmp_path / "run"
    launch(run_dir, "trainer.steps=6")
    launch(run_dir, "trainer.steps=8", "resume=true")
    steps = [line["step"] for line in read_lines(run_dir / METRICS_FILE) if "step" in line]
    assert steps == list(range(1, 9))
    audit = [sys.executable, "-m", "inflight.cli", "audit", str(run_dir)]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=600, check=False)
    assert audited.returncode == 0, audited.stdout[-3000:] + audited.stderr[-3000:]
    assert "passed: every tag that was checked is right" in audited.stdout
    base = AutoModelForCausalLM.from_pretrained(prepare("tiny"), dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5, 13]])
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, run_dir / "checkpoints" / "step-000008")(ids).logits
    assert not torch.allclose(before, after, atol=1e-3)
