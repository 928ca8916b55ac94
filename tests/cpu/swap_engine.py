"""In-process vLLM engines on CPU with our worker, and what the swap tests compare them with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import bench.in_process  # noqa: F401 - before anything of vLLM

WORKER = "inflight.generator.worker.cpu.InflightCPUWorker"
PROMPTS = [[3, 4, 5, 13], [6, 6], [7, 8, 9, 13, 10, 11, 14], [12]]
LENGTH = 12


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]


def start(model: Path, **arguments: Any) -> Any:
    """An engine that runs in this process."""
    from vllm import LLM

    return LLM(
        str(model),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False,
            "worker_cls": WORKER,
            "seed": 0,
            **arguments,
        },
    )


def stop(engine: Any) -> None:
    """Frees what vLLM keeps in globals, so that the next engine of this process can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def greedy_params(length: int = LENGTH) -> Any:
    """Greedy, with the log-probability of each token."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=length, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)


def answer(output: Any) -> Answer:
    """The part of a RequestOutput that tests look at."""
    completion = output.outputs[0]
    logprobs = [next(iter(at.values())).logprob for at in completion.logprobs]
    versions = tuple((span[0], span[1]) for span in map(tuple, completion.token_versions))
    return Answer(tuple(completion.token_ids), tuple(logprobs), versions)


def greedy(engine: Any) -> list[Answer]:
    """Answers to PROMPTS; versions aside, equal weights give bit-identical ones."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [answer(output) for output in engine.generate(prompts, greedy_params(), use_tqdm=False)]


def said(answers: list[Answer]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probabilities alone, for comparing across versions."""
    return [(each.tokens, each.logprobs) for each in answers]


def stage(engine: Any, path: Path, version: int) -> None:
    """Fills the shadow from a file."""
    engine.collective_rpc("stage_weights", args=(str(path), version))


def swap(engine: Any, path: Path, version: int) -> None:
    """Stages a file and makes it live."""
    stage(engine, path, version)
    ranks = engine.llm_engine.commit_weights(version)
    assert not any("error" in rank for rank in ranks), ranks


def weights_file(model: Path) -> Path:
    """The single safetensors file of a model directory."""
    return model / "model.safetensors"


def perturbed(model: Path, directory: Path, seed: int) -> Path:
    """A model directory like `model` with every weight (norms too) moved by a seeded amount."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    noise = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise)
        for name, tensor in load_file(weights_file(model)).items()
    }
    save_file(tensors, weights_file(directory), metadata={"format": "pt"})
    return directory


def reference_logprobs(model: Path, prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """[T] float32: what plain transformers gives to `tokens` after `prompt`."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = plain(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def two_model_logprobs(a: Path, b: Path, prompt: list[int], tokens: tuple[int, ...], k: int) -> torch.Tensor:
    """[T] what transformers gives when A samples the first k tokens and B, on top of A's KV, the rest.

    The last of A's tokens is fed, and so its KV written, by the first step of B.
    """
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[*prompt, *tokens]])
    cut = len(prompt) + k - 1
    with torch.no_grad():
        first = AutoModelForCausalLM.from_pretrained(a, dtype=torch.float32)(ids[:, :cut], use_cache=True)
        plain = AutoModelForCausalLM.from_pretrained(b, dtype=torch.float32)
        second = plain(ids[:, cut:-1], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits[0, len(prompt) - 1 :], second.logits[0]])
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
