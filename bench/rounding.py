"""How many rounding steps log-probabilities are off, by model and dtype: `python -m bench.rounding`.

The calibration of inflight/agreement.py. Each model samples in the dtype (plain transformers, token by token over a KV
cache) and scores what it sampled in a wider one (float32; float64 for float32), with the same weights. Prints a
Markdown table; the last column says whether the rule agrees, with 8, 20 and all prompts. On a CPU.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from inflight.agreement import STEP, compare
from inflight.models import ModelError, prepare

PROMPTS = 40
TOKENS = 24
WIDER = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
RANDOM: dict[str, PreTrainedConfig] = {
    "Llama, 4 layers of 512": LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.05,
    ),
    "Llama, 24 layers, large weights": LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.15,
        tie_word_embeddings=True,
    ),
    "Qwen2, 6 layers": Qwen2Config(vocab_size=5000, num_hidden_layers=6, initializer_range=0.1, **SHAPE),
    "Qwen3, 6 layers": Qwen3Config(vocab_size=5000, num_hidden_layers=6, head_dim=64, initializer_range=0.2, **SHAPE),
    "Mistral, window of 16": MistralConfig(
        vocab_size=1000, num_hidden_layers=4, head_dim=64, sliding_window=16, initializer_range=0.1, **SHAPE
    ),
    "Gemma 3": Gemma3TextConfig(vocab_size=1000, num_hidden_layers=4, head_dim=64, initializer_range=0.1, **SHAPE),
    "Phi-3": Phi3Config(vocab_size=1000, num_hidden_layers=4, initializer_range=0.1, pad_token_id=0, **SHAPE),
    "GPT-2": GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, initializer_range=0.1),
}


@dataclass(frozen=True, slots=True)
class Scored:
    """Sampled tokens, [PROMPTS * TOKENS] each."""

    recorded: np.ndarray
    replayed: np.ndarray
    prompt: np.ndarray


def main() -> None:
    """A row for each model, dtype and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(STEP), action="append", help="default: all")
    arguments = parser.parse_args()
    print("| model | dtype | T | median, steps | largest | by the median | largest, nats | mean | slope | agrees |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, model, prompts in _models():
        for dtype in arguments.dtype or STEP:
            for temperature in (1.0, 0.7):
                print(_row(name, dtype, temperature, _scored(model, prompts, dtype, temperature)), flush=True)


def _models() -> Iterator[tuple[str, PreTrainedModel, list[list[int]]]]:
    """Name, float32 model and prompts of one length."""
    for name in ("tiny", "tiny-untied"):
        yield name, AutoModelForCausalLM.from_pretrained(prepare(name), dtype=torch.float32), _drawn(17)
    for name, config in RANDOM.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        yield f"{name} (random)", model, _drawn(config.vocab_size)
    try:
        folder = prepare("smollm2")
    except ModelError as error:
        print(error)
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = (f"1+2=3\n5+4=9\n{a}+{b}=" for a in range(3, 9) for b in range(1, 10))
    prompts = [tokenizer(text).input_ids for text in texts]
    same = [each for each in prompts if len(each) == len(prompts[0])][:PROMPTS]
    yield "SmolLM2-135M", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), same


def _drawn(vocabulary: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, vocabulary) for _ in range(8)] for _ in range(PROMPTS)]


@torch.inference_mode()
def _scored(model: PreTrainedModel, prompts: list[list[int]], dtype: str, temperature: float) -> Scored:
    state = {name: each.to(getattr(torch, dtype)) for name, each in model.state_dict().items()}

    def cast(to: torch.dtype) -> PreTrainedModel:
        twin = type(model)(model.config).to(to).eval()
        twin.load_state_dict({name: each.to(to) for name, each in state.items()})
        return twin

    torch.manual_seed(0)
    sequence = torch.tensor(prompts)
    engine = cast(getattr(torch, dtype))
    cache = None
    fresh = sequence
    recorded = []
    for _ in range(TOKENS):
        output = engine(fresh, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = (output.logits[:, -1].float() / temperature).log_softmax(-1)
        fresh = torch.multinomial(logprobs.exp(), 1)
        recorded.append(logprobs.gather(1, fresh))
        sequence = torch.cat([sequence, fresh], 1)
    start = len(prompts[0])
    logits = cast(WIDER[dtype])(sequence).logits[:, start - 1 : -1] / temperature
    replayed = logits.log_softmax(-1).gather(2, sequence[:, start:, None])[..., 0]
    return Scored(
        torch.cat(recorded, 1).double().numpy().ravel(),
        replayed.double().numpy().ravel(),
        np.repeat(np.arange(len(prompts)), TOKENS),
    )


def _row(name: str, dtype: str, temperature: float, scored: Scored) -> str:
    agreed = []
    for prompts in (8, 20, PROMPTS):
        chosen = scored.prompt < prompts
        found = compare(
            scored.recorded[chosen],
            scored.replayed[chosen],
            dtype,
            temperature=temperature,
            prompt=scored.prompt[chosen],
        )
        agreed.append("yes" if found.agrees else "NO: " + "; ".join(found.problems))
    figures = (
        f"{found.steps:.2g} | {found.steps_max:.3g} | {found.steps_max / max(found.steps, 1.0):.2g} | "
        f"{found.largest:.2g} | {found.mean:+.1e} | {found.slope:.4f}"
    )
    return f"| {name} | {dtype} | {temperature:g} | {figures} | {', '.join(dict.fromkeys(agreed))} |"


if __name__ == "__main__":
    main()
