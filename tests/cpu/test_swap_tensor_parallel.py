"""Two tensor-parallel ranks in processes of their own: each packs its slices, both swap at the same step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from swap_engine import PROMPTS, greedy, perturbed, reference_logprobs, said, start, stop, swap, weights_file

from inflight.models import prepare

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
def test_two_ranks_swap_to_what_transformers_says(name: str, tmp_path: Path) -> None:
    a = prepare(name)
    b = perturbed(a, tmp_path / "b", seed=1)
    engine = start(a, tensor_parallel_size=2)
    try:
        first = said(greedy(engine))
        for version, model in enumerate((b, a), start=1):
            swap(engine, weights_file(model), version)
            answers = greedy(engine)
            for prompt, found in zip(PROMPTS, answers, strict=True):
                assert found.versions == ((0, version),)
                expected = reference_logprobs(model, prompt, found.tokens)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)
        assert said(answers) == first
    finally:
        stop(engine)
