"""What docs/own_model.md says: chats of one's own and a model of the hub, which is trained for two epochs, evaluated,
killed, resumed, exported and served by vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from hub_server import Repository, commit_of, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import config as configuration
from inflight.exits import DATA_ENDED
from inflight.groups import index_of
from inflight.metrics import EVAL_FILE, METRICS_FILE, read_lines
from inflight.models import ModelError, prepare
from inflight.prompts import ModelTokens
from inflight.resources import folder as shipped
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader
from inflight.tasks import make
from inflight.tasks.course import Course

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"
COMMIT, MODEL = commit_of("first"), "owner/model"
ROWS, EPOCHS, EVALUATED = 200, 2, 10
EVERY = 5
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
"""For the tiny model, which has none of its own."""
SMALL = (
    "machine=cpu",
    "launch.needs_gpu=false",
    "generator.max_model_len=96",
    "generator.max_num_seqs=16",
    "generator.kv_cache_gib=0.25",
    "rollout.group_size=2",
    "rollout.max_tokens=4",
    "rollout.file_mib=0.05",
    "publish.join_timeout_s=400",
    "generator.start_timeout_s=400",
    "model.dtype=float32",
    "trainer.autocast=false",
)
TIMEOUT_S = 1200


@dataclass(frozen=True)
class Scale:
    """How much of the page's run a model can do on two cores in some minutes."""

    held_out: int
    """Rows."""
    step: int
    """Groups."""

    @property
    def trained_on(self) -> int:
        return (ROWS - self.held_out) * EPOCHS

    @property
    def steps(self) -> int:
        return self.trained_on // self.step

    def overrides(self) -> tuple[str, ...]:
        return (
            *SMALL,
            f"task.options.held_out={self.held_out / ROWS}",
            f"eval.questions={EVALUATED}",
            f"trainer.groups_per_step={self.step}",
            f"trainer.micro_batch={self.step}",
        )


MODELS = {"tiny": Scale(held_out=10, step=19), "smollm2": Scale(held_out=100, step=20)}


@pytest.mark.parametrize("model", MODELS)
def test_the_page_from_a_file_of_problems_to_a_served_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        directory = prepare(model)
    except ModelError as error:
        pytest.skip(str(error))
    write_files(tmp_path)
    scale = MODELS[model]
    with serving() as hub:
        hub.repositories[MODEL] = Repository({COMMIT: repository(directory, tmp_path / "hub")}, {"main": COMMIT})
        train = Commands(hub.url, tmp_path, scale.overrides())
        (doctor,) = (each for each in commands() if each.startswith("inflight doctor --config-dir"))
        checked = train.run(doctor)
        assert checked.returncode == 0, checked.stdout
        begun = train.start(train.page[0])
        at_least(7, tmp_path / "runs/mine", begun)
        kill(begun)
        undone = order(tmp_path / "runs/mine")
        resumed = train.start(train.page[1])
        output, _ = resumed.communicate(timeout=TIMEOUT_S)
        assert resumed.returncode == DATA_ENDED, f"{output}\n{logs(tmp_path / 'runs/mine')}"
    run_dir = tmp_path / "runs/mine"
    assert configuration.load(run_dir).model.revision == COMMIT
    assert len(list((run_dir / "rollouts").iterdir())) > 2, "several files"
    require_questions(run_dir, undone, scale)
    require_figures(run_dir, scale)
    for command in (
        "inflight report runs/mine",
        "inflight show runs/mine --last",
        "inflight eval runs/mine",
        "inflight export runs/mine exported",
    ):
        done = train.run(next(each for each in commands() if each.startswith(command)))
        assert done.returncode == 0, done.stdout + done.stderr
    with served(train) as url:
        assert answer(url) == generated(tmp_path / "exported")


class Commands:
    """Those of the page, as a user gives them, in a folder and with what makes the run small."""

    def __init__(self, hub: str, folder: Path, overrides: tuple[str, ...]) -> None:
        self._folder, self._overrides = folder, overrides
        self.page = [each for each in commands() if each.startswith("inflight launch")]
        assert len(self.page) == 2
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        own = {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self.environment = environment | own | {"HF_DATASETS_CACHE": str(folder / "cache"), "PATH": path}

    def start(self, command: str, *more: str) -> subprocess.Popen[str]:
        """In the background; what composes the configuration gets the overrides."""
        asked = [*command.split(), *(self._overrides if "--config-name" in command else ()), *more]
        if asked[0] == "inflight":  # this tree's, whichever is installed
            asked[:1] = [sys.executable, "-m", "inflight.cli"]
        return subprocess.Popen(
            asked,
            cwd=self._folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        process = self.start(command)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(command, process.returncode, output, "")


# --- the page -------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Without their comments."""
    return [line.partition("#")[0].strip() for block in blocks("") for line in block.splitlines()]


def write_files(folder: Path) -> None:
    """The page's three files, with 200 problems of the form of the one that it shows."""
    (shown,) = blocks("json")
    row = json.loads(shown)
    sums = [(n % 10, n // 10) for n in range(ROWS)]
    rows = [row | {"messages": [row["messages"][0] | {"content": f"{a}+{b}"}], "answer": str(a + b)} for a, b in sums]
    (folder / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (reward,) = blocks("python")
    (folder / "my_rewards.py").write_text(reward)
    text = (shipped("configs") / "dataset.yaml").read_text()
    for old, new in (
        (r"model:\n  name: \S+", f"model:\n  name: {MODEL}"),
        (r"  # - name: my_rewards.py:\w+ # yours.*\n  #   weight", "  - name: my_rewards.py:short\n    weight"),
        (r"every: \d+ # steps", f"every: {EVERY} # steps"),
        (r"checkpoint_every: \d+", f"checkpoint_every: {EVERY}"),
    ):
        text, changed = re.subn(old, new, text)
        assert changed == 1, old
    (folder / "dataset.yaml").write_text(text)


def repository(directory: Path, folder: Path) -> Path:
    shutil.copytree(directory, folder)
    template = folder / "chat_template.jinja"
    if not template.exists():
        template.write_text(TEMPLATE)
    return folder


# --- the run --------------------------------------------------------------------------------------------------------


def at_least(steps: int, run_dir: Path, launcher: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(read_lines(run_dir / METRICS_FILE)) < steps:
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.terminate()
            pytest.fail(f"no step {steps}\n{launcher.communicate(timeout=60)[0]}\n{logs(run_dir)}")
        time.sleep(0.1)


def kill(launcher: subprocess.Popen[str]) -> None:
    """The launcher and the trainer, with SIGKILL: neither saves anything."""
    children = psutil.Process(launcher.pid).children()
    (trainer,) = [each for each in children if "inflight.trainer" in each.cmdline()]
    os.kill(trainer.pid, signal.SIGKILL)
    launcher.kill()
    launcher.communicate(timeout=60)


def order(run_dir: Path) -> dict[int, tuple[str, list[int]]]:
    """Key and prompt of each question that was answered, by its index."""
    return {
        index_of(group.group_id): (group.prompt_key, list(map(int, group.rollouts[0].prompt_ids)))
        for group in Reader(run_dir / ROLLOUTS_FILE)
    }


def require_questions(run_dir: Path, undone: dict[int, tuple[str, list[int]]], scale: Scale) -> None:
    """Each once an epoch, in the order of the task, rendered by the model's template, before and after the kill."""
    config = configuration.load(run_dir)
    task = make(config.task, config.seed)
    course, tokens = Course(task, config.task.epochs), ModelTokens(str(run_dir.parents[1] / "hub"))
    items = [course.item(index) for index in range(scale.trained_on)]
    wanted = {index: (item.key, list(tokens.encode(item.prompt))) for index, item in enumerate(items)}
    assert order(run_dir) == wanted
    assert undone.items() <= wanted.items()
    trained = [index for line in read_lines(run_dir / METRICS_FILE) for index in line["questions"]]
    assert sorted(trained) == sorted(wanted)
    keys = [item.key for item in items]
    assert Counter(keys) == dict.fromkeys(keys, EPOCHS)
    assert keys[: len(keys) // EPOCHS] != keys[len(keys) // EPOCHS :], "another order in the second epoch"
    held_out = {task.held_out_item(index).key.rpartition(":")[2] for index in range(task.held_out_size())}
    assert len(held_out) == scale.held_out
    assert not held_out & {key.rpartition(":")[2] for key in keys}


def require_figures(run_dir: Path, scale: Scale) -> None:
    steps = read_lines(run_dir / METRICS_FILE)
    assert [line["step"] for line in steps] == list(range(1, scale.steps + 1))
    assert all(set(line["rewards"]) == {"numeric_match", "short"} for line in steps)
    assert all(0 < line["rewards"]["short"] <= 1 for line in steps)
    evaluations = read_lines(run_dir / EVAL_FILE)
    assert [line["version"] for line in evaluations] == list(range(EVERY, scale.steps + 1, EVERY))
    assert all((line["eval/answers"], line["eval/mixed"]) == (EVALUATED, 0) for line in evaluations)


def logs(run_dir: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run_dir / "logs").glob("*.log")))


# --- what was exported ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(commands_of: Commands) -> Iterator[str]:
    """One of the page's last two commands, until the end of the context; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = ("--enforce-eager", "--max-model-len", "96", "--kv-cache-memory-bytes", str(1 << 26), "--dtype", "float32")
    begins = "vllm serve" if "vllm" in importlib.metadata.packages_distributions()["vllm"] else "python -m vllm"
    command = next(each for each in commands() if each.startswith(begins))
    process = commands_of.start(command, "--host", "127.0.0.1", "--port", str(port), *small)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        for each in (*children, process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(process.communicate(timeout=60)[0])
            time.sleep(0.5)


CHAT = [{"role": "user", "content": "3+4"}]


def answer(url: str) -> str:
    """What the server says in a chat, by the template that was exported."""
    asked = {"model": "exported", "messages": CHAT, "temperature": 0, "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


def generated(directory: Path) -> str:
    """The most probable answer, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    found: list[int] = []
    while len(found) < 8 and tokenizer.eos_token_id not in found[-1:]:
        with torch.inference_mode():
            found.append(int(model(torch.tensor([ids + found])).logits[0, -1].argmax()))
    return str(tokenizer.decode(found, skip_special_tokens=True))
