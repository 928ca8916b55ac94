"""TRL's own AsyncGRPO on the same questions, model and two GPUs, as it comes but for its attention kernel.

    python -m bench.peers.async_grpo                   two GPUs, TRL beside a plain vLLM server (0.22 to 0.31)

TRL loads a kernel from the hub; here torch's variable-length attention takes its place, after it was compared with
scaled-dot-product attention on the GPU. Its loss, optimizer, queue and rollout process are TRL's, so its figures say
what a user of TRL has, not what another way to update weights does: that is what `bench.peers` is for. Time counts from
the first optimizer step, which TRL begins when it has the first batch. Held-out rewards are measured afterwards, by
transformers on the trainer's GPU. Results: async_grpo-SEED.json under `out`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import DictConfig

from bench.peers.processes import Process
from bench.peers.varlen import check, flash_attn_varlen_func

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Makes a prompt of a message as it is: TRL knows chats only."""
ANSWER = {
    "defaults": {"role": "assistant"},
    "fields": {"content": {"close_pattern": r"<\|im_end\|>", "content": "text"}},
}
"""How transformers parses an answer: it is text, without calls of tools."""
QUESTIONS = 2000


class Reward:
    """The task's own score of token ids; TRL sends it to its rollout process."""

    __name__ = "score"

    def __init__(self, name: str, options: dict[str, Any], seed: int, model: str) -> None:
        self._name = name
        self._options = options
        self._seed = seed
        self._model = model
        self._parts: Any = None

    async def __call__(self, completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        if self._parts is None:
            from inflight.config import TaskConfig
            from inflight.prompts import ModelTokens
            from inflight.tasks import make

            self._parts = make(TaskConfig(self._name, self._options), self._seed), ModelTokens(self._model)
        task, tokens = self._parts
        pairs = zip(completion_ids, index, strict=True)
        return [float(await task.score(task.item(at), tokens.decode(list(ids)))) for ids, at in pairs]


def serve(config: DictConfig, directory: Path, port: int, log: Path) -> Process:
    """A plain vLLM server with its NCCL transfer, as TRL's documentation starts it."""
    arguments = {
        "model": directory,
        "port": port,
        "host": "127.0.0.1",
        "max-model-len": 384,
        "max-num-seqs": 128,
        "dtype": "bfloat16",
        "gpu-memory-utilization": 0.3,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": '{"backend":"nccl"}',
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    device = str(config.generator_devices).partition(",")[0]
    environment = {"CUDA_VISIBLE_DEVICES": device, "VLLM_SERVER_DEV_MODE": "1"}
    return Process(["-m", "vllm.entrypoints.openai.api_server", *flags], log, environment)


def train(config: DictConfig, run: Any, directory: Path, url: str, out: Path, **parts: Any) -> tuple[Any, Any]:
    """TRL's trainer for `arm_s` seconds; itself, and the callback that kept weights and time. `parts` go to it."""
    import pyarrow
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    from bench.peers.async_grpo_clock import Clock
    from inflight.tasks import make

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    task = make(run.task, run.seed)
    prompts = [[{"role": "user", "content": task.item(index).prompt}] for index in range(QUESTIONS)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = ANSWER
    table = pyarrow.table({"prompt": prompts, "index": list(range(QUESTIONS))})
    sequences = run.trainer.groups_per_step * run.rollout.group_size
    options = AsyncGRPOConfig(
        output_dir=str(out / "trl"),
        bf16=config.device == "cuda",
        use_cpu=config.device == "cpu",
        seed=run.seed,
        num_generations=run.rollout.group_size,
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=1,
        token_budget=0,
        max_completion_length=run.rollout.max_tokens,
        max_steps=run.trainer.steps,
        learning_rate=run.trainer.learning_rate,
        max_inflight_tasks=3 * sequences,
        max_grad_norm=run.trainer.grad_clip,
        vllm_server_base_url=url,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    clock = Clock(config.arm_s, config.snapshot_s)
    trainer = AsyncGRPOTrainer(
        model=str(directory),
        reward_funcs=Reward(run.task.name, dict(run.task.options), run.seed, run.model.name),
        args=options,
        train_dataset=Dataset(table, fingerprint="questions"),  # else a hash of it, in which dill fails with pyarrow 26
        processing_class=tokenizer,
        callbacks=[clock],
        **parts,
    )
    trainer.train()
    return trainer, clock


def evaluate(run: Any, directory: Path, device: str, snapshots: list[tuple[float, dict[str, Any]]]) -> list[Any]:
    """[(seconds, held-out reward)], of greedy answers of transformers; the first one of the start weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.peers.held_out import Questions
    from inflight.prompts import ModelTokens

    questions = Questions(run, ModelTokens(run.model.name))
    prompts = questions.prompts
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    found = []
    for at, weights in [(0.0, {}), *snapshots]:
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=run.rollout.max_tokens, do_sample=False)
        found.append((at, asyncio.run(questions.reward(made[:, width:].tolist()))))
    return found


@hydra.main(version_base=None, config_path="../configs", config_name="peers")
def main(config: DictConfig) -> None:
    """One arm for each seed, each with a server of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(config.trainer_devices)
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"  # a machine without a network has no other
    from inflight.launcher.compose import compose
    from inflight.models import prepare

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    directory = prepare(compose(config.base, list(config.common)).model.name)
    print(json.dumps({"attention_error": check()}), flush=True)
    for seed in config.seeds:
        run = compose(config.base, [*config.common, *config.in_flight, f"seed={seed}", f"run_dir={out / 'unused'}"])
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server = serve(config, directory, port, out / "async_grpo_server.log")
        try:
            began = time.monotonic()
            trainer, clock = train(config, run, directory, f"http://127.0.0.1:{port}", out)
        finally:
            server.end()
        history = [entry for entry in trainer.state.log_history if "perf/rollout_wait_s" in entry]
        report = {
            "arm": "async_grpo",
            "seed": seed,
            "took_s": time.monotonic() - began,
            **clock.figures(history),
            "held_out": evaluate(run, directory, clock.device, clock.snapshots),
            "command": " ".join(sys.argv),
        }
        (out / f"async_grpo-{seed}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({key: value for key, value in report.items() if key != "rewards"}), flush=True)


if __name__ == "__main__":
    main()
