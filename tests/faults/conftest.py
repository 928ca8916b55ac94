"""Faults on real processes."""

from __future__ import annotations

import pytest
from run import Run


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(*overrides: str, vllm: bool = False) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", *overrides, vllm=vllm))
        return runs[-1]

    yield make
    for each in runs:
        each.end()
