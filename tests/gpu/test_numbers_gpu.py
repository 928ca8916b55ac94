"""A generator whose CUDA graphs compute something else than the model is refused by the comparison with the trainer.

vLLM 0.26.0 and 0.33.0 decode a random Mistral of two layers with `sliding_window=32` otherwise with CUDA graphs than
eagerly, without inflight too. Run: `pytest -m gpu tests/gpu/test_numbers_gpu.py -s` on one GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from inflight import config as configuration
from inflight.bus import Listener
from inflight.config import BusConfig, GeneratorConfig, ModelConfig, PublishConfig, RunConfig, TaskConfig
from inflight.models import prepare
from inflight.trainer.start_comparison import prompts_for
from inflight.weights.publish.comparison import Comparison, NumbersDiffer, Sampled
from inflight.weights.publish.publisher import Publisher
from inflight.weights.source import WeightSource

pytestmark = pytest.mark.gpu
START_S = 400.0
LENGTH = 256


def make_mistral(folder: Path) -> Path:
    """Random weights, wide enough to make tokens differ; the tiny model's tokenizer."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        sliding_window=32,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in prepare("tiny").glob("*token*"):
        shutil.copy(file, folder)
    return folder


class Served:
    """One generator with a model, and the publisher of the same weights, on one GPU."""

    def __init__(self, folder: Path, *, eager: bool) -> None:
        from transformers import AutoModelForCausalLM

        model = make_mistral(folder / "model")
        (folder / "run" / "bus").mkdir(parents=True)
        self.config = RunConfig(
            model=ModelConfig(str(model), "bfloat16"),
            task=TaskConfig("addition"),
            run_dir=str(folder / "run"),
            generator=GeneratorConfig(
                kv_cache_gib=1.0, max_num_seqs=32, max_model_len=LENGTH, extra={"enforce_eager": True} if eager else {}
            ),
            bus=BusConfig(heartbeat_s=0.5, dead_after_s=30),
            publish=PublishConfig(join_timeout_s=START_S),
        )
        configuration.save(self.config)
        # Weights of bfloat16, computed with in float32 and by the plainest attention: as right as can be.
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.policy.cuda().eval()
        self.listener = Listener(self.config.endpoint("weights"), self.config.bus)
        self.publisher = Publisher(
            WeightSource(self.policy, "bfloat16"),
            self.listener,
            self.config.publish,
            version=0,
            ranks={"g0": 1},
            routes_file=self.config.routes_file,
        )
        command = [sys.executable, "-m", "inflight.generator", "--run-dir", self.config.run_dir, "--name", "g0"]
        self.log = folder / "g0.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        self.publisher.wait_joined(START_S)

    @torch.no_grad()
    def score(self, asked: Sequence[Sampled]) -> list[list[float]]:
        """The policy's own log-probabilities."""
        found = []
        for prompt, tokens in asked:
            ids = torch.tensor([[*prompt, *tokens]], device="cuda")
            logits = self.policy(ids).logits[0, len(prompt) - 1 : -1]
            chosen = ids[0, len(prompt) :, None]
            found.append(logits.log_softmax(dim=-1).gather(1, chosen)[:, 0].tolist())
        return found

    def compare(self) -> list[Comparison]:
        prompts = prompts_for(self.policy.config, LENGTH, 0)
        assert {len(each) > 32 for each in prompts} == {True, False}
        return self.publisher.compare(self.score, prompts)

    def publish(self, version: int) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter)).copy_(parameter.bfloat16().float())
        self.publisher.publish(version)
        self.publisher.flush(60)

    def close(self) -> None:
        self.publisher.finish("over")
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.publisher.close()
        self.listener.close()
        print(f"\n--- {self.log}", *self.log.read_text(errors="replace").splitlines()[-15:], sep="\n")


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    opened = Served(tmp_path, eager=request.param == "eager")
    yield opened
    opened.close()


@pytest.mark.parametrize("served", ["eager"], indirect=True)
def test_a_window_without_graphs_agrees_before_and_after_a_swap(served: Served) -> None:
    print(served.compare())
    served.publish(1)
    print(served.compare())


@pytest.mark.parametrize("served", ["graphs"], indirect=True)
def test_a_window_with_graphs_that_are_wrong_is_refused(served: Served) -> None:
    """Where a vLLM has this right, nothing is raised, and the test says so by failing."""
    with pytest.raises(NumbersDiffer) as error:
        served.compare()
    print(error.value)
    assert "g0 does not compute what the trainer does, at version 0: " in str(error.value)
    assert "sliding window" in str(error.value)
