"""How long the report of a long run takes to write and to open, and how large it is: `python -m bench.report_page`.

    python -m bench.report_page [--rollouts 10000] [--tokens 400] [--steps 5000] [--opened 5]

Makes a run folder of random rollouts, writes its report, and opens it in Chromium (`make test-browser` installs it).
Opened is the page when it has drawn everything, from the navigation on.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from inflight import config as configuration
from inflight.config import ModelConfig, RunConfig, TaskConfig
from inflight.metrics import METRICS_FILE, SWAPS_FILE, JsonLines
from inflight.models import prepare
from inflight.report.html import page
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.types import PrefillSpan, Rollout, RolloutGroup, Turn, VersionSpan

GROUP = 8


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--opened", type=int, default=5, help="how often; 0: only written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, given.rollouts, given.tokens, given.steps)
        began = time.perf_counter()
        page.write([run], run / page.REPORT_FILE)
        written = time.perf_counter() - began
        size = (run / page.REPORT_FILE).stat().st_size
        recorded = (run / ROLLOUTS_FILE).stat().st_size
        print(
            f"{given.rollouts} rollouts of {given.tokens} tokens ({recorded / 1e6:.0f} MB): "
            f"report written in {written:.1f} s, {size / 1e6:.2f} MB"
        )
        if given.opened:
            seconds = [opened(run / page.REPORT_FILE) for _ in range(given.opened)]
            shown = ", ".join(f"{each:.2f}" for each in seconds)
            print(f"opened in {statistics.median(seconds):.2f} s at the median ({shown})")


def write_run(run: Path, rollouts: int, tokens: int, steps: int) -> None:
    """A folder with a configuration, `steps` steps, as many swaps, and random rollouts of SmolLM2's or else the tiny
    model's tokens."""
    try:
        model = prepare("smollm2")
        vocabulary = 49_000
    except ValueError:
        model = prepare("tiny")
        vocabulary = 17
    task = TaskConfig(name="addition")
    configuration.save(RunConfig(model=ModelConfig(name=str(model)), task=task, run_dir=str(run)))
    draw = random.Random(0)
    with JsonLines(run / METRICS_FILE) as metrics, JsonLines(run / SWAPS_FILE) as swaps:
        for step in range(1, steps + 1):
            figures = dict.fromkeys(("wait_s", "train_s", "publish_wait_s", "pack_s", "guard_s"), draw.random())
            by_reward = {"reward": draw.random(), "reward_all": draw.random(), "loss": draw.gauss(0, 1)}
            metrics.write(
                {
                    "step": step,
                    "version": step,
                    "time_s": step * 2.0,
                    "tokens_trained": 1000,
                    "lag_mean": draw.random(),
                    "lag_max": 2,
                    "lag_counts": {"0": 500, "1": 500},
                    **figures,
                    **by_reward,
                }
            )
            swaps.write(
                {
                    "event": "committed",
                    "time": 1e9 + step * 2.0,
                    "generator": "g0",
                    "version": step,
                    "gap_s": draw.random() / 1e3,
                    "transfer_s": 0.1,
                    "ready_s": 0.2,
                    "commit_s": 0.01,
                    "running": 64,
                }
            )
    with Writer(run / ROLLOUTS_FILE) as writer:
        for index in range(rollouts // GROUP):
            writer.append(group(draw, index, rollouts // GROUP, tokens, steps, vocabulary))


def group(draw: random.Random, index: int, groups: int, tokens: int, steps: int, vocabulary: int) -> RolloutGroup:
    """GROUP rollouts with two versions each, spread evenly over the run's time."""
    version = index * (steps - 1) // groups
    began = 1e9 + index * 2.0 * steps / groups
    members = [
        Rollout(
            rollout_id=f"q{index}/{member}",
            group_id=f"q{index}",
            prompt_ids=[1, 2, 3],
            reward=draw.random(),
            generator="g0",
            started=began,
            finished=began + 4.0,
            first_token_s=0.1,
            turn=Turn(
                token_ids=[draw.randrange(vocabulary) for _ in range(tokens)],
                logprobs=[-draw.random() for _ in range(tokens)],
                token_versions=[VersionSpan(0, version), VersionSpan(tokens // 2, version + 1)],
                prefill_versions=[PrefillSpan(0, 0, version)],
                finish_reason="stop",
            ),
        )
        for member in range(GROUP)
    ]
    return RolloutGroup(group_id=f"q{index}", prompt_key=f"k{index}", rollouts=members)


def opened(file: Path) -> float:
    """Seconds from the navigation until everything is drawn, in a browser that has just started."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("INFLIGHT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        began = time.perf_counter()
        tab.goto(file.as_uri())
        tab.wait_for_function("document.documentElement.dataset.ready && inflight.views.every((v) => v.bands.width)")
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


if __name__ == "__main__":
    main()
