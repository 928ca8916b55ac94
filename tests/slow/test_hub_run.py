"""A run from a model of the hub, with several end tokens: its start, its resume after the branch has moved, and vLLM
with what is exported of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import Repository, commit_of, serving
from transformers import AutoModelForCausalLM

from inflight import cli
from inflight import config as configuration
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

FIRST, SECOND = commit_of("first"), commit_of("second")
MODEL = "owner/tiny"
END, FURTHER = 1, {5, 9}
"""The tokenizer's end token, and those that the configuration alone names."""
PROMPT = [7, 8, 4, 10]
TIMEOUT_S = 600


def test_a_run_from_the_hub_resumes_with_its_commit_and_its_end_tokens(tmp_path, tiny_model):
    folders = {name: tmp_path / "hub" / name for name in (FIRST, SECOND)}
    for folder in folders.values():
        shutil.copytree(tiny_model, folder)
        (folder / "generation_config.json").unlink()
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": [END, *FURTHER]}))
    run_dir = tmp_path / "run"
    with serving() as hub:
        hub.repositories[MODEL] = Repository(folders, {"main": FIRST})
        launch(hub.url, tmp_path, run_dir, "trainer.steps=2")
        begun = ended_by(run_dir)
        hub.repositories[MODEL].branches["main"] = SECOND
        launch(hub.url, tmp_path, run_dir, "trainer.steps=4", "resume=true")
    model = configuration.load(run_dir).model
    assert (model.name, model.revision) == (MODEL, FIRST)
    assert (run_dir / "checkpoints" / "step-000004").is_dir()
    assert begun.issuperset(FURTHER)
    resumed = ended_by(run_dir, skip=2)
    assert resumed.issuperset(FURTHER)
    assert begun | resumed <= {END, *FURTHER}
    export(run_dir, tmp_path / "out")
    assert served(tmp_path / "out") == generated(tmp_path / "out")


def served(directory: Path) -> list[int]:
    """What vLLM's own server process computes, with nothing of inflight in it."""
    code = f"""
from vllm import LLM, SamplingParams
engine = LLM({str(directory)!r}, dtype="auto", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
(answer,) = engine.generate({{"prompt_token_ids": {PROMPT}}}, SamplingParams(temperature=0, max_tokens=12))
print("tokens", *answer.outputs[0].token_ids)
"""
    environment = os.environ | {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("tokens"))
    return [int(each) for each in line.split()[1:]]


def generated(directory: Path) -> list[int]:
    """The most probable tokens by transformers, up to the first end token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + 12 and ids[-1] not in {END, *FURTHER}:
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def export(run_dir: Path, out: Path) -> None:
    assert cli.main(["export", str(run_dir), str(out)]) == 0


def ended_by(run_dir: Path, skip: int = 0) -> set[int]:
    """The tokens that completions which have stopped end with, and no other place holds; of versions from `skip` on."""
    found = set()
    for group in Reader(run_dir / ROLLOUTS_FILE):
        for rollout in group.rollouts:
            turn = rollout.turn
            if turn.token_versions[0].version >= skip:
                assert not {END, *FURTHER} & set(turn.token_ids[:-1])
                if turn.finish_reason == "stop":
                    found.add(turn.token_ids[-1])
    return found


def launch(url: str, home: Path, run_dir: Path, *overrides: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "inflight.launcher", "--config-name", "tiny", f"run_dir={run_dir}"]
    done = subprocess.run(
        [*command, f"model.name={MODEL}", *overrides],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
