"""The commands that README and docs show (not a test file)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("", "sh", "bash", "console")
"""Languages of blocks that may hold commands; without one a block may also hold output."""


def blocks(page: Path) -> Iterator[str]:
    """The text of each block for a shell, fenced or indented by four spaces; continued lines are joined."""
    language: str | None = None
    lines: list[str] = []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line.strip("` "), []
                continue
            if language in SHELLS:
                yield re.sub(r"\\\n\s*", "", "\n".join(lines))
            language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("    "):
            yield line.strip()


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command of ours in a block: without comments, redirections and what runs it."""
    found = []
    for page in PAGES:
        for line in (line for block in blocks(page) for line in block.splitlines()):
            start = re.search(r"(?:^|\s)(inflight|make|python -m) ", line)
            if start is None or not re.match(r"(\.|srun|inflight|make|python|\s)", line):
                continue
            text = re.split(r"\s{2,}(?=[^\s-])|\s#|\s>\s|\s&\s*$", line[start.start() :].strip())[0]
            found += [(page.name, shlex.split(each)) for each in alternatives(text)]
    return found


def alternatives(text: str) -> list[str]:
    """`patch apply | revert` stands for two commands."""
    first, *others = text.split(" | ")
    return [first, *(f"{first.rpartition(' ')[0]} {other}" for other in others)]


def mentioned() -> list[tuple[str, list[str]]]:
    """(page, words) of each `python -m MODULE` in running text."""
    code = re.compile(r"`(python -m [^`\n]+)`")
    return [(page.name, shlex.split(found)) for page in PAGES for found in code.findall(page.read_text())]


SLOW = "tests/slow/test_documented_runs.py"
PRINTED = "tests/unit/test_documented_commands.py"
"""Takes the arguments as far as `--print` or the parser: for what needs GPUs, a hub, a cluster or hours."""
RUN_BY = {
    "make demo": f"{SLOW}::test_a_demo",
    "make demo ARGS=audit.keep_versions=true": f"{SLOW}::test_a_demo",
    "make test": "the suite itself",
    "inflight launch --config-name demo run_dir=runs/mine trainer.checkpoint_every=10": f"{SLOW}::test_a_demo",
    "inflight launch --config-name demo trainer.lora.rank=16": f"{SLOW}::test_a_demo",
    "inflight launch --config-name demo trainer.steps=100 generator.count=2": PRINTED,
    "inflight launch --config-name demo model.name=Qwen/": PRINTED,
    "inflight launch --config-name demo_gpu": PRINTED,
    "inflight launch --config-name tiny": f"{SLOW}::test_tiny_runs",
    "inflight launch --config-name tiny run_dir=runs/fork": f"{SLOW}::test_tiny_runs",
    "inflight launch --config-name tiny run_dir=runs/own --print": f"{SLOW}::test_a_trainer_of_ones_own",
    "python -m inflight.generator --run-dir runs/own --name g0": f"{SLOW}::test_a_trainer_of_ones_own",
    "inflight launch --config-dir . --config-name dataset": "tests/slow/test_own_model.py::test_the_page",
    "python -m vllm.entrypoints.openai.api_server --model exported": "tests/slow/test_own_model.py::test_the_page",
    "inflight audit runs/<folder> --through engine --limit 100": f"{SLOW}::test_a_demo",
    "inflight audit runs/": f"{SLOW}::test_commands_on_a_run",
    "inflight audit RUN --no-tf32": "tests/gpu/test_fleet_gpu.py::test_tokens",
    "inflight eval ": f"{SLOW}::test_commands_on_a_run",
    "inflight export runs/mine": f"{SLOW}::test_commands_on_a_run",
    "inflight report runs/": f"{SLOW}::test_commands_on_a_run",
    "inflight show runs/mine": f"{SLOW}::test_commands_on_a_run",
    "inflight trace runs/mine": f"{SLOW}::test_commands_on_a_run",
    "inflight watch runs/mine": f"{SLOW}::test_commands_on_a_run",
    "inflight doctor": f"{SLOW}::test_the_machine",
    "inflight doctor --config-dir . --config-name dataset": "tests/slow/test_own_model.py::test_the_page",
    "inflight model Qwen/Qwen2.5-0.5B-Instruct --revision main": f"{SLOW}::test_a_model_of_the_hub",
    "inflight patch check": f"{SLOW}::test_the_patch",
    "inflight patch apply": f"{SLOW}::test_the_patch",
    "inflight patch revert": f"{SLOW}::test_the_patch",
    "inflight join $address": "tests/hosts/test_hosts.py::test_trainer_generators_and_actor_on_three_hosts",
    "python -m pytest tests/cpu/": "the suite itself",
    "python -m pytest -m gpu": PRINTED,
    "python -m bench.interruption": PRINTED,
    "python -m bench.transfer": PRINTED,
    "python -m bench.trainer_memory": PRINTED,
    "python -m bench.peers": PRINTED,
    "python -m bench.gpu_arena": PRINTED,
    "python -m bench.neighbour": PRINTED,
}
"""Beginning of a command → the test that runs it; the longest beginning counts."""


def run_by(words: list[str]) -> str | None:
    """The test that runs a command."""
    text = " ".join(words)
    return next((RUN_BY[start] for start in sorted(RUN_BY, key=len, reverse=True) if text.startswith(start)), None)
