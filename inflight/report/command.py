"""`inflight report RUN`: the results of a run, as text or as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.metrics import METRICS_FILE, read_lines
from inflight.report import staleness, summary, summary_text
from inflight.report.html import page

EXAMPLES = """examples:
  inflight report runs/mine                          the figures, in the terminal
  inflight report runs/mine --html                   runs/mine/report.html, as a run writes it at its end
  inflight report runs/a runs/b --html both.html     two runs side by side, in one file

The HTML file needs no network and shows prompts and answers; secrets in the configuration are redacted."""
HERE = Path("\0")
"""What `--html` without a file stands for: no path that can be given."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for bad input, in one line."""
    parser = argparse.ArgumentParser(
        prog="inflight report",
        description="The results of a run, and figures of its tokens by lag.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_run = "a run folder; of a running run, too"
    to_file = "write a page, by default into the run"
    parser.add_argument("run_dirs", type=file_path, nargs="+", metavar="RUN", help=of_run)
    parser.add_argument("--html", type=file_path, nargs="?", const=HERE, metavar="OUT", help=to_file)
    given = parser.parse_args(argv)
    try:
        if given.html is None:
            for run_dir in given.run_dirs:
                print(*([run_dir] if len(given.run_dirs) > 1 else []), _text(run_dir), sep="\n")
            return 0
        target = _target(given.run_dirs, given.html)
        page.write(given.run_dirs, target)
    except BrokenPipeError:
        raise  # the reader of the output has enough: cli.py
    except (ValueError, OSError) as error:
        return say_why("report", error, BAD_INPUT)
    print(target)
    return 0


def _target(run_dirs: Sequence[Path], out: Path) -> Path:
    if out != HERE:
        if out.is_dir():
            raise ValueError(f"--html {out} is a folder: a file is written")
        return out
    if len(run_dirs) > 1:
        raise ValueError("--html needs a file for several runs: --html OUT")
    return run_dirs[0] / page.REPORT_FILE


def _text(run_dir: Path) -> str:
    if not run_dir.is_dir():
        raise ValueError(f"there is no folder {run_dir}")
    lines = read_lines(run_dir / METRICS_FILE)
    if not lines:
        raise ValueError(f"{run_dir} has no {METRICS_FILE}, or nothing is in it yet")
    with summary.damage_named(run_dir):
        versions = staleness.table(staleness.by_version(lines), "version")
    return f"{summary_text.table(summary.summarize(run_dir))}\n{versions}"
