"""What a process of a run inherits: no ranks of another program, all else; and room for its connections."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.launcher.compose import compose
from inflight.launcher.last_words import last_lines
from inflight.launcher.launch import launch
from inflight.processes import Command
from inflight.surroundings import foreign, forget_foreign

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
}
OTHERS = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "PMI_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "FSDP_VERSION": "2",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "VLLM_PORT": "29500",
    "VLLM_DP_SIZE": "2",
    "INFLIGHT_JOIN_KEY": "secret",
}
PASS = {
    "HF_TOKEN": "secret",
    "HF_HOME": "/hf",
    "OPENAI_API_KEY": "secret",
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DEBUG": "WARN",
    "https_proxy": "http://proxy",
    "NO_PROXY": "localhost",
    "SLURM_JOB_ID": "17",
    "SLURM_TMPDIR": "/tmp/17",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "MY_RANK": "1",
    "RANKS": "2",
}
ALLOCATOR = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("kind", ["trainer", "rank", "generator", "actor"])
def test_ranks_of_another_program_are_dropped_and_all_else_passes(kind):
    assert foreign(TORCHRUN | OTHERS | PASS, kind) == sorted(TORCHRUN | OTHERS)


def test_the_allocators_settings_are_the_trainers_alone():
    assert foreign(ALLOCATOR, "trainer") == foreign(ALLOCATOR, "rank") == []
    assert foreign(ALLOCATOR, "generator") == ALLOCATOR


def test_a_process_forgets_what_it_should_not_have_inherited():
    environment = {**TORCHRUN, **PASS, ALLOCATOR[0]: "expandable_segments:True"}
    assert forget_foreign(environment, "generator") == sorted([*TORCHRUN, ALLOCATOR[0]])
    assert environment == PASS


TELLS = """
import os, resource
print(*(f"{name}={value}" for name, value in sorted(os.environ.items())), sep="\\n", flush=True)
print("files", *resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
"""


def test_a_runs_processes_start_without_them_and_the_run_says_so(tmp_path, monkeypatch, capfd):
    """RANK and the like would have the trainer wait for ranks that were never started."""
    for name, value in (TORCHRUN | OTHERS | PASS).items():
        monkeypatch.setenv(name, value)
    config = compose("tiny", [f"run_dir={tmp_path}/run"])
    log = config.path / "logs" / "trainer.log"
    assert launch(config, [Command("trainer", "trainer", [sys.executable, "-c", TELLS], log, {"RUN_DIR": "x"})]) == 0
    seen = dict(line.split("=", 1) for line in last_lines(log, 1000) if "=" in line)
    assert not seen.keys() & (TORCHRUN | OTHERS).keys()
    assert (PASS | {"RUN_DIR": "x"}).items() <= seen.items()
    said = capfd.readouterr().out
    assert "the processes of the run do not inherit ACCELERATE_MIXED_PRECISION, " in said
    assert ", RANK, " in said


LAUNCHES_WITH_FEW_FILES = f"""
import resource, sys
from inflight.launcher.compose import compose
from inflight.launcher.launch import launch
from inflight.processes import Command
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
config = compose("tiny", ["run_dir=" + sys.argv[1]])
log = config.path / "logs" / "trainer.log"
sys.exit(launch(config, [Command("trainer", "trainer", [sys.executable, "-c", {TELLS!r}], log)]))
"""


def test_a_runs_processes_may_open_as_many_files_as_the_system_allows(tmp_path: Path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > 256, "the test needs room"
    command = [sys.executable, "-c", LAUNCHES_WITH_FEW_FILES, str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=180, env=os.environ)
    assert last_lines(tmp_path / "run" / "logs" / "trainer.log", 1) == [f"files {hard} {hard}"]
