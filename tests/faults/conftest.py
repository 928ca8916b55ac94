"""Faults on real processes."""

from __future__ import annotations

import pytest
from run import Run


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(*overrides: str) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", *overrides))
        return runs[-1]

    yield make
    for each in runs:
        each.end()
