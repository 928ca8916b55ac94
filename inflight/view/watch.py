"""`inflight watch RUN`: the live view of a run that was started elsewhere, and of one that has ended."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from inflight.config import CONFIG_FILE, load
from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.metrics import SUMMARY_FILE
from inflight.report.html.state import is_running, state
from inflight.view.figures import whole
from inflight.view.progress import Progress
from inflight.view.resumption import resumption
from inflight.view.snapshot import StatusSnapshot, read
from inflight.view.view import View

POLL_S = 0.5
OLD_S = 10.0
"""Age of a snapshot from which on the launcher may hang; it writes one each second."""
EXAMPLES = """examples:
  inflight watch runs/mine              until the run ends; Ctrl-C ends the view, not the run
  inflight watch runs/mine --once       the view as it is now
  inflight watch runs/mine | cat        lines, as in a log

What it shows comes from the run folder, so that it also works where the folder is mounted."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for bad input, in one line."""
    parser = argparse.ArgumentParser(
        prog="inflight watch",
        description="The live view of a run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=file_path, metavar="RUN", help="a run folder")
    parser.add_argument("--once", action="store_true", help="show it once and stop")
    given = parser.parse_args(argv)
    try:
        return watch(given.run_dir, once=given.once)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        raise  # the reader of the output has enough: cli.py
    except (ValueError, OSError) as error:
        return say_why("watch", error, BAD_INPUT)


def watch(run_dir: Path, *, once: bool = False) -> int:
    """Shows the run until it has ended. Raises ConfigError for a folder without a run, ValueError for a damaged
    snapshot."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise ValueError(f"{run_dir} is not a run folder, or not yet: the launcher makes it when its checks are done")
    config = load(run_dir)
    progress = Progress(config)
    file = config.snapshot_file
    told = False
    with View(progress, line_every_s=config.launch.line_every_s, command="watch") as view:
        while True:
            running = is_running(run_dir)
            found = read(file)
            _take(view, progress, found)
            if not running:
                progress.end()
            if once or not running:
                break
            told = _tell_age(view, found, told)
            view.refresh()
            time.sleep(POLL_S)
    if not running:
        print(state(run_dir, len(progress.record.steps), config.trainer.steps))
        if not (run_dir / SUMMARY_FILE).is_file():  # its launcher was killed, and has said nothing
            done = whole(progress.step) or 0
            if done < config.trainer.steps:
                print(resumption(config, done))
    return 0


def _take(view: View, progress: Progress, snapshot: StatusSnapshot | None) -> None:
    if snapshot is None:  # the run has ended, or was just begun: its files say the rest
        return
    progress.began(snapshot.elapsed_s + max(time.time() - snapshot.time, 0.0))
    for gone in set(progress.sources()) - set(snapshot.processes):
        progress.forget(gone)
    for name, values in snapshot.processes.items():
        view.heard(name, values)


def _tell_age(view: View, snapshot: StatusSnapshot | None, told: bool) -> bool:
    """Warns once when nothing new comes; returns whether that was done for this silence."""
    age = 0.0 if snapshot is None else time.time() - snapshot.time
    if age > OLD_S and not told:
        view.tell(f"inflight watch: the launcher has reported nothing for {age:.0f} s")
    return age > OLD_S
