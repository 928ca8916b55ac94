"""Commands of README and docs, given as they stand there, where a CPU can carry them out in ten minutes.

`RUN_BY` in tests/unit/documented.py says of each command which test runs it; that the table is whole is tested there
beside it. What needs GPUs, a cluster or more time is only parsed and composed, in
tests/unit/test_documented_commands.py. INFLIGHT_DEMO_STEPS=6 shortens the three runs of the demo, of six minutes each
on two free cores, on a machine that is busy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from documented import ROOT, SLOW, blocks, commands, run_by
from hub_server import Repository, commit_of, serving

from inflight.exits import DONE
from inflight.metrics import METRICS_FILE, read_lines
from inflight.models import ModelError, prepare
from inflight.report import summary
from inflight.trainer.checkpoint import index

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LIMIT_S = 1500
"""Against hanging; no measure of speed."""
PATIENT = ("publish.join_timeout_s=400", "generator.start_timeout_s=400")
"""For a busy machine: the one thing that is added to documented runs."""
PROGRAMS = f"""
inflight() {{ {shlex.quote(sys.executable)} -m inflight.cli "$@"; }}
python() {{ {shlex.quote(sys.executable)} "$@"; }}
"""


def environment() -> dict[str, str]:
    """A user's: other tests have set vLLM's variables for engines in this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def started(words: list[str], folder: Path, *more: str) -> subprocess.Popen[str]:
    """A documented command, in a folder."""
    module = ["-m", "inflight.cli"] if words[0] == "inflight" else []
    return subprocess.Popen(
        [sys.executable, *module, *words[1:], *more],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def done(words: list[str], folder: Path, *more: str, code: int = DONE) -> str:
    """What a documented command prints, once it has ended with `code`."""
    process = started(words, folder, *more)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        pytest.fail(f"{' '.join(words)} did not end\n{process.communicate(timeout=60)[0]}")
    logs = [f"--- {log}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("runs/*/logs/*.log"))]
    assert process.returncode == code, "\n".join([" ".join(words), output, *logs])
    return output


def those_of(test: str) -> list[list[str]]:
    """The documented commands that a test here runs, each once."""
    found = [words for _, words in commands() if run_by(words) == f"{SLOW}::{test}"]
    return [shlex.split(text) for text in dict.fromkeys(shlex.join(words) for words in found)]


def newest(folder: Path) -> Path:
    """The run that a launch without `run_dir` has made."""
    return max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", those_of("test_tiny_runs"), ids=" ".join)
def test_tiny_runs(words, tmp_path):
    output = done(words, tmp_path, *PATIENT)
    run = newest(tmp_path)
    assert summary.read(run).steps == 10
    assert f"report      {run / 'report.html'}" in output
    assert "passed" in done(["inflight", "audit", str(run)], tmp_path)


def recipe(words: list[str]) -> list[str]:
    """What `make demo ARGS=…` runs on a machine without a GPU."""
    (line,) = re.findall(r"^demo: .*\n\t@?(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    given = dict(word.split("=", 1) for word in words[2:])
    values = {"PY": "python", "DEMO": "demo", "MACHINE": "cpu", "ARGS": given.get("ARGS", "")}
    return shlex.split(re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], line))


def shortened() -> list[str]:
    """Nothing, unless the one who runs these tests wants it."""
    steps = os.environ.get("INFLIGHT_DEMO_STEPS")
    return [f"trainer.steps={steps}"] if steps else []


def needs_smollm2() -> None:
    try:
        prepare("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


def wanted_steps() -> int:
    return int(os.environ.get("INFLIGHT_DEMO_STEPS", 32))


def test_a_demo_is_audited_through_the_engine(tmp_path):
    """`make demo`, with the versions kept."""
    needs_smollm2()
    demo = next(words for words in those_of("test_a_demo") if words[:2] == ["make", "demo"] and len(words) > 2)
    done(recipe(demo), tmp_path, *PATIENT, *shortened())
    run = newest(tmp_path)
    assert summary.read(run).steps == wanted_steps()
    audit = next(words for words in those_of("test_a_demo") if words[1] == "audit")
    output = done([word.replace("runs/<folder>", str(run)) for word in audit], tmp_path)
    assert "passed" in output, output


def test_a_demo_that_was_stopped_is_resumed(tmp_path):
    needs_smollm2()
    every = 3 if shortened() else 10
    first, second = (words for words in those_of("test_a_demo") if "run_dir=runs/mine" in words)
    more = [*PATIENT, *shortened(), *(["trainer.checkpoint_every=3"] if shortened() else [])]
    begun = started(first, tmp_path, *more)
    run = tmp_path / "runs" / "mine"
    until(lambda: len(read_lines(run / METRICS_FILE)) > every, begun)
    begun.send_signal(signal.SIGINT)
    output, _ = begun.communicate(timeout=LIMIT_S)
    assert begun.returncode == 128 + signal.SIGINT, output
    assert "resuming from step" in done(second, tmp_path, *more)
    assert [line["step"] for line in read_lines(run / METRICS_FILE)] == list(range(1, wanted_steps() + 1))


def test_a_demo_of_an_adapter(tmp_path):
    needs_smollm2()
    (adapter,) = (words for words in those_of("test_a_demo") if "trainer.lora.rank=16" in words)
    done(adapter, tmp_path, *PATIENT, *shortened())
    run = newest(tmp_path)
    assert summary.read(run).steps == wanted_steps()
    assert (index.newest(run) / "adapter_config.json").is_file()


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls while the process lives."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.send_signal(signal.SIGINT)
            pytest.fail(process.communicate(timeout=60)[0])
        time.sleep(0.2)


# --- commands on a run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands are given: with `runs/mine` of 40 steps, and other names of it that the pages use."""
    here = tmp_path_factory.mktemp("user")
    evaluated = ("eval.every=20", "task.options.held_out=12", "eval.sampling.max_tokens=16")
    launch = ["inflight", "launch", "--config-name", "tiny", "run_dir=runs/mine"]
    done([*launch, "trainer.steps=40", "trainer.checkpoint_every=10", *evaluated], here, *PATIENT)
    for words in those_of("test_commands_on_a_run"):
        for word in words:
            if word.startswith("runs/") and not (name := here / "runs" / word.split("/")[1]).exists():
                name.symlink_to("mine")
    return here


SAID = {
    "audit": r"passed",
    "eval": r"eval/reward|reward",
    "export": r"the model of .*step-000040",
    "report": r"steps|report|html",
    "show": r"⟦v\d+⟧",
    "trace": r"trace\.json",
    "watch": r"complete, 40 of 40 steps",
}
"""Subcommand → a part of what it prints."""


@pytest.mark.parametrize(
    "words",
    sorted(those_of("test_commands_on_a_run"), key=lambda words: words[1:4] != ["export", "runs/mine", "exported"]),
    ids=" ".join,
)
def test_commands_on_a_run(words, folder):
    """`exported` is made first, which a later command evaluates."""
    output = done(words, folder)
    assert re.search(SAID[words[1]], output), output
    if "--json" in words:
        assert json.loads(output.splitlines()[-1])["version"] == 40
    if words[1] == "export":
        assert (folder / words[3] / "model.safetensors").is_file()
        if words[3] != "exported":  # the pages make it twice
            shutil.rmtree(folder / words[3])


# --- a trainer of one's own -----------------------------------------------------------------------------------------

MODEL = """# of the page that leaves it to its reader
import torch
from transformers import AutoModelForCausalLM
from inflight.models import prepare
model = AutoModelForCausalLM.from_pretrained(prepare("tiny"), dtype=torch.float32)
"""


@pytest.mark.parametrize("page", ["README.md", "docs/own_trainer.md"])
def test_a_trainer_of_ones_own(page, tmp_path):
    """The blocks of a page as they stand there: a generator without a launcher, and the loop that publishes to it."""
    text = (ROOT / page).read_text()
    (shell,) = (block for block in blocks(ROOT / page) if "python -m inflight.generator" in block)
    (loop,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Publisher(" in block)
    finish = next(line for line in loop.splitlines() if "publisher.finish(" in line)
    (tmp_path / "loop.py").write_text(MODEL + loop.replace(finish, f"    print(publisher.committed)\n{finish}"))
    with (tmp_path / "generator.log").open("w") as log:
        generator = subprocess.Popen(
            ["bash", "-ec", PROGRAMS + shell],
            cwd=tmp_path,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert "{'g0': 100}" in done(["python", "loop.py"], tmp_path), (tmp_path / "generator.log").read_text()
        assert generator.wait(timeout=120) == 0, (tmp_path / "generator.log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(generator.pid, signal.SIGTERM)
        generator.wait(timeout=60)


# --- what needs no run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", those_of("test_the_machine"), ids=" ".join)
def test_the_machine(words, tmp_path):
    assert re.search(r"^ok +vLLM patch", done(words, tmp_path), re.MULTILINE)


def test_the_patch(tmp_path):
    """Of the installed vLLM `check`, and `apply`, which changes nothing in a patched one; of a copy of its sources,
    where the pages name a folder, also `revert`."""
    found = those_of("test_the_patch")
    installed = [words for words in found if "--path" not in words and words[2] != "revert"]
    assert {words[2] for words in installed} == {"check", "apply"}
    for words in sorted(installed, key=lambda words: words[2] != "check"):
        assert done(words, tmp_path).strip().endswith(": patched")
    copy = tmp_path / "my-vllm"
    shutil.copytree(Path(importlib.util.find_spec("vllm").origin).parent, copy / "vllm", ignore=no_source)
    (tmp_path / "here").mkdir()
    on_copy = [[word.replace("DIR", "../my-vllm") for word in words] for words in found if "--path" in words]
    assert {words[2] for words in on_copy} == {"check", "apply"}
    revert = ["inflight", "patch", "revert", "--path", "../my-vllm"]
    assert ": pristine, was patched" in done(revert, tmp_path / "here")
    for words in sorted(on_copy, key=lambda words: words[2] != "apply"):
        assert ": patched" in done(words, tmp_path / "here")


def no_source(folder: str, names: list[str]) -> list[str]:
    """What a copy of Python sources leaves out."""
    return [name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()]


def test_a_model_of_the_hub(tmp_path, tiny_model, monkeypatch):
    (words,) = those_of("test_a_model_of_the_hub")
    commit = commit_of("first")
    with serving() as hub:
        hub.repositories[words[2]] = Repository({commit: tiny_model}, {"main": commit})
        for name, value in (("ENDPOINT", hub.url), ("HOME", str(tmp_path / "home")), ("HUB_OFFLINE", "0")):
            monkeypatch.setenv(f"HF_{name}", value)
        directory = Path(done(words, tmp_path).splitlines()[-1])
    assert (directory / "config.json").is_file()


def test_a_scrape_is_measured(tmp_path):
    output = done(["python", "-m", "bench.scrape", "--steps", "50", "--scrapes", "20"], ROOT)
    assert [json.loads(line)["beside"] for line in output.splitlines()] == ["nothing", "a busy thread"]
