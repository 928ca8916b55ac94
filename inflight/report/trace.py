"""`inflight trace RUN`: what happened when, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.report.timeline import Timeline

MOST_SEQUENCES = 20_000
EXAMPLES = """examples:
  inflight trace runs/mine                            runs/mine/trace.json
  inflight trace runs/mine --out t.json --sequences 500

Open the file at https://ui.perfetto.dev, which keeps it in the browser, or in chrome://tracing. It holds no text of
prompts or answers."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for bad input, in one line."""
    parser = argparse.ArgumentParser(
        prog="inflight trace",
        description="Steps, publishes, transfers, swaps, generations and rewards of a run on one clock.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=file_path, metavar="RUN", help="a run folder; of a running run, too")
    parser.add_argument("--out", type=file_path, metavar="FILE", help="where to write (default: RUN/trace.json)")
    text = f"how many of the last sequences it shows (default: {MOST_SEQUENCES})"
    parser.add_argument("--sequences", type=int, default=MOST_SEQUENCES, metavar="N", help=text)
    given = parser.parse_args(argv)
    target = given.out or given.run_dir / "trace.json"
    try:
        if given.sequences < 1:
            raise ValueError(f"--sequences={given.sequences} is not allowed: 1 or more")
        if not given.run_dir.is_dir():
            raise ValueError(f"there is no folder {given.run_dir}")
        timeline = Timeline.of(given.run_dir, given.sequences)
        if not timeline.events:
            raise ValueError(f"{given.run_dir} has recorded nothing yet")
        partial = target.with_name(f"{target.name}.partial")
        partial.write_text(json.dumps({"traceEvents": timeline.chrome(), "displayTimeUnit": "ms"}))
        partial.replace(target)
    except (ValueError, OSError) as error:
        return say_why("trace", error, BAD_INPUT)
    for note in timeline.notes:
        print(f"inflight trace: {note}", file=sys.stderr)
    print(target)
    return 0
