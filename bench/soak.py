"""Does a run survive its items, its rewards and the deaths of its generators, with books that add up at the end?

    python -m bench.soak                                30 minutes on two cores
    python -m bench.soak duration_s=240 kill_every_s=60

A share of the questions is broken in the ways of bench/soak_task.py, rewards time out, and a generator is killed every
few minutes. Afterwards: the launcher and the actor are alive, no question was trained on twice, no broken one at all,
every question that was granted is trained on, dropped, failed, buffered or in flight, and the audit passes.
The exit code is 1 when one of these does not hold. Results: JSON under `out`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hydra
import psutil
from omegaconf import DictConfig

from bench.soak_task import fault_of
from inflight.exits import STOPPED
from inflight.metrics import METRICS_FILE, read_lines

POLL_S = 1.0


class Soak:
    """One run, what was killed in it, and which processes were seen."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.folder = Path(config.out).resolve() / f"run-{int(time.time())}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "inflight.launcher",
            "--config-name",
            config.base,
            f"run_dir={self.folder}",
            f"seed={config.seed}",
            "task.name=bench.soak_task:Broken",
            f"task.options={{share: {config.share}}}",
            *config.overrides,
        ]
        self._log = open(self.folder.with_suffix(".log"), "wb")  # noqa: SIM115 - the launcher writes to it
        self._launcher = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.killed: list[tuple[float, str]] = []
        self.seen: dict[str, set[int]] = {"a0": set(), "g0": set(), "g1": set()}

    def run(self) -> None:
        """Lets it run and kills generators in turn. Raises RuntimeError when the launcher ends before it should."""
        self._wait_for_a_step()
        began = next_kill = time.monotonic()
        while time.monotonic() - began < self._config.duration_s:
            if self._launcher.poll() is not None:
                raise RuntimeError(
                    f"the launcher ended by itself with {self._launcher.returncode}: see {self._log.name}"
                )
            self._look()
            if time.monotonic() >= next_kill + self._config.kill_every_s:
                next_kill += self._config.kill_every_s
                self._kill(f"g{len(self.killed) % 2}", time.monotonic() - began)
            time.sleep(POLL_S)

    def alive(self, name: str) -> bool:
        """Whether the process of that name runs now."""
        return self._process(name) is not None

    def stop(self) -> int | None:
        """The launcher's exit code after SIGTERM; None when it did not end in time and was killed."""
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
        try:
            return self._launcher.wait(self._config.stop_s)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            return None
        finally:
            self._log.close()

    def _wait_for_a_step(self) -> None:
        deadline = time.monotonic() + self._config.start_s
        while not read_lines(self.folder / METRICS_FILE) if (self.folder / METRICS_FILE).exists() else True:
            if time.monotonic() > deadline or self._launcher.poll() is not None:
                raise RuntimeError(f"no step within start_s={self._config.start_s:g}: see {self._log.name}")
            time.sleep(POLL_S)

    def _look(self) -> None:
        for name, pids in self.seen.items():
            if process := self._process(name):
                pids.add(process.pid)

    def _kill(self, name: str, at: float) -> None:
        if process := self._process(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                self.killed.append((round(at, 1), name))

    def _process(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[-2:] == ["--name", name]:
                        return child
        return None


def judge(lines: list[dict[str, Any]], seed: int, share: float) -> dict[str, Any]:
    """What the metrics say of questions: which were trained on, and whether the books add up."""
    trained = [question for line in lines for question in line["questions"]]
    last = lines[-1]
    failed = dict(last["groups_failed"])
    dropped = dict(last["groups_dropped"])
    settled = sum(failed.values()) + sum(dropped.values()) + len(trained)
    broken = Counter(fault for index in range(max(trained) + 1) if (fault := fault_of(seed, index, share)))
    return {
        "steps": len(lines),
        "tokens_trained": sum(line["tokens_trained"] for line in lines),
        "questions_trained": len(trained),
        "trained_twice": sorted(index for index, count in Counter(trained).items() if count > 1),
        "broken_but_trained": sorted(index for index in trained if fault_of(seed, index, share)),
        "broken_by_kind": dict(broken),
        "groups_failed": failed,
        "groups_dropped": dropped,
        "not_accounted_for": last["groups_granted"] - settled - last["groups_in_flight"] - last["buffer"],
    }


def audit(folder: Path, prompts: int, timeout_s: float) -> dict[str, Any]:
    """The audit's exit code and last line."""
    command = [sys.executable, "-m", "inflight.cli", "audit", str(folder), "--limit", str(prompts)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"code": None, "last": f"not done within audit_s={timeout_s:g}"}
    return {"code": done.returncode, "last": (done.stdout + done.stderr).strip().splitlines()[-1:]}


def faults(result: dict[str, Any]) -> list[str]:
    """What does not hold, a line each."""
    checks = {
        "the launcher did not end as it was asked to": result["launcher_code"] != STOPPED,
        "the actor was lost for good": not result["actor_alive"],
        "a question was trained on twice": bool(result["trained_twice"]),
        "a broken question was trained on": bool(result["broken_but_trained"]),
        "questions are not accounted for": result["not_accounted_for"] != 0,
        "no group failed, so nothing was tested": not result["groups_failed"],
        "the audit did not pass": result["audit"]["code"] != 0,
    }
    return [line for line, wrong in checks.items() if wrong]


@hydra.main(version_base=None, config_path="configs", config_name="soak")
def main(config: DictConfig) -> None:
    """Runs, judges, writes and prints the result."""
    soak = Soak(config)
    try:
        soak.run()
        alive = soak.alive("a0")
    finally:
        code = soak.stop()
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": platform.processor(),
        "cores": os.cpu_count(),
        "launcher_code": code,
        "actor_alive": alive,
        "killed": soak.killed,
        "starts": {name: len(pids) for name, pids in soak.seen.items()},
        **judge(read_lines(soak.folder / METRICS_FILE), config.seed, config.share),
        "audit": audit(soak.folder, config.audit_prompts, config.audit_s),
    }
    result["faults"] = faults(result)
    (soak.folder.parent / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if result["faults"]:
        raise SystemExit("; ".join(result["faults"]))


if __name__ == "__main__":
    main()
