"""The bench of the trainer's memory, at a tiny shape: it learns, and says of what."""

from __future__ import annotations

import json
import math

from bench.trainer_memory import main

SMALL = ["--shape", "tiny", "--layers", "2", "--sequence", "48", "--sequences", "2", "--steps", "1"]


def test_a_line_of_figures(capsys):
    assert main([*SMALL, "--packing", "--top-p", "0.9"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["layers"], line["ranks"], line["attention"], line["device"]) == (2, 1, "eager", "cpu")
    assert line["parameters"] == 2 * 1024 * 256 + 2 * (256 * 256 * 3 + 256 * 512 * 3 + 256 + 256 + 512) + 256
    assert line["tokens_per_s"] > 0
    assert math.isfinite(line["loss"])
    assert line["peak_gib_of_the_fullest_rank"] is None
