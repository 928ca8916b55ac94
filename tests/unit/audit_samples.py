"""A generator written here, one that keeps its KV over swaps and can be made to lie, and run folders of what it said
(not a test file)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import msgspec
import numpy as np
import torch
from rollout_samples import make_config, make_rollout
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from inflight.audit import run
from inflight.audit.alternatives import previous_of
from inflight.audit.replay import KeptVersions, Stale, TransformersReplayer
from inflight.audit.segments import segments
from inflight.config import AuditConfig, ModelConfig, Sampling, save
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Writer
from inflight.sampling import processed_logprobs
from inflight.types import PrefillSpan, RolloutGroup, VersionSpan

VERSIONS = 3
LENGTH = 16
EXACT = 1e-5


# --- a generator ----------------------------------------------------------------------------------------------------


def weights(model_dir, version, step):
    """Version 0 is the checkpoint; each next one moves every weight by a seeded amount."""
    tensors = load_file(model_dir / "model.safetensors")
    for number in range(1, version + 1):
        noise = torch.Generator().manual_seed(number)
        for name, tensor in tensors.items():
            tensors[name] = tensor + step * torch.randn(tensor.shape, generator=noise)
    return tensors


class Generator:
    """Samples token by token. `live[v]` is what runs when version v is stamped: untied, so that it can be torn."""

    def __init__(self, model_dir, step=0.05, temperature=1.0, top_p=1.0, top_k=0):
        self.states = [weights(model_dir, version, step) for version in range(VERSIONS)]
        config = AutoConfig.from_pretrained(model_dir)
        config.tie_word_embeddings = False
        self.live = []
        for state in self.states:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
            model.load_state_dict({"lm_head.weight": state["model.embed_tokens.weight"], **state})
            self.live.append(model)
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.noise = torch.Generator().manual_seed(0)

    def leave_old(self, version, fragment):
        """A torn swap: parameters with `fragment` in their name keep the values of the version before."""
        older = self.live[version - 1].state_dict()
        stale = {name: tensor for name, tensor in older.items() if fragment in name}
        assert stale
        self.live[version].load_state_dict(stale, strict=False)

    @torch.no_grad()
    def rollout(self, name, prompt, swaps, *, preempt=(), redo=None, chunk=None, prefix=None, length=LENGTH):
        """`swaps` is the version by token. `preempt`: tokens before which all KV is computed anew. `redo`: (token,
        position) before and from which it is. `chunk`: (position, version) up to which and under which a first chunk of
        the prompt was computed. `prefix`: the same, but secretly.
        """
        tokens, kv = list(prompt), DynamicCache()
        logprobs, events, kept = [], [], []
        for index in range(length):
            version = swaps[index]
            if index in preempt:
                kv = DynamicCache()
            if redo is not None and index == redo[0]:
                kv.crop(redo[1] - kv.get_seq_length())
                events.append(PrefillSpan(*redo, version))
            if index == 0 or index in preempt:
                events.append(PrefillSpan(index, 0, version))
            for part in (chunk, prefix) if index == 0 else ():
                if part is not None:
                    self.live[part[1]](torch.tensor([tokens[: part[0]]]), past_key_values=kv)
            if index == 0 and chunk is not None:
                events = [PrefillSpan(0, 0, chunk[1]), PrefillSpan(0, chunk[0], version)]
            pending = torch.tensor([tokens[kv.get_seq_length() :]])
            logits = self.live[version](pending, past_key_values=kv).logits[:, -1]
            distribution = processed_logprobs(logits, Sampling(self.temperature, self.top_p, self.top_k))[0]
            token = int(torch.multinomial(distribution.exp(), 1, generator=self.noise))
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            kept.append(distribution.isfinite().nonzero()[:, 0].tolist())
        return make_rollout(
            "g",
            name,
            spans=spans_of(swaps),
            length=length,
            token_ids=tokens[len(prompt) :],
            logprobs=logprobs,
            prefill_versions=events,
            kept=kept if self.top_k else None,
        ), prompt


def at(*starts):
    """Versions by token: `at(0, 5, 9)` is 0, then 1 from token 5 on, then 2 from 9 on."""
    return [sum(start <= index for start in starts) - 1 for index in range(LENGTH)]


def spans_of(versions):
    """(start, version) of each run of equal versions."""
    return [(i, v) for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]


PLANS = [at(0, 5, 9), at(0, 1, 2), at(0, 15), at(0), at(0, 4), at(0, 7, 8), [2] * LENGTH, [1] * 10 + [2] * 6]
PROMPTS = [[3, 4, 5, 13], [6, 6], [7, 8, 9, 13, 10, 11, 14, 3, 3, 9], [12]]


def generate(generator, **kwargs):
    prompts = itertools.cycle(PROMPTS)
    return [generator.rollout(i, next(prompts), plan, **kwargs) for i, plan in enumerate(PLANS)]


def write(folder, model_dir, generator, made, *, versions=range(VERSIONS), dtype="float32"):
    """A run folder with these rollouts and the true weights of each version."""
    config = dataclasses.replace(
        make_config(
            folder,
            size=size(made),
            temperature=generator.temperature,
            top_p=generator.top_p,
            top_k=generator.top_k,
        ),
        model=ModelConfig(name=str(model_dir), dtype=dtype),
        audit=AuditConfig(keep_versions=True),
    )
    save(config)
    for version in versions:
        path = config.version_file(version)
        path.parent.mkdir(exist_ok=True)
        save_file(generator.states[version], path)
    rollouts = [msgspec.structs.replace(rollout, prompt_ids=list(prompt)) for rollout, prompt in made]
    with Writer(folder / ROLLOUTS_FILE) as writer:
        for number in range(len(made) // size(made)):
            members = rollouts[number * size(made) : (number + 1) * size(made)]
            writer.append(RolloutGroup(group_id=f"q{number}", prompt_key="k", rollouts=members))
    groups = len(made) // size(made)
    line = {"groups_granted": groups, "groups_in_flight": 0, "groups_failed": {}, "questions": list(range(groups))}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def size(made):
    """Rollouts of a group, so that all are whole."""
    return 2 if len(made) % 2 == 0 else len(made)


def retag(made, change):
    """The same rollouts with `change(turn)` giving fields to replace."""
    return [
        (msgspec.structs.replace(r, turn=msgspec.structs.replace(r.turn, **change(r.turn))), prompt)
        for r, prompt in made
    ]


NOISE = 0.03
SMALL = 2e-3
"""Versions so close that no single token can tell them apart under the noise."""
MANY = 96


class NoisyRun:
    """A run whose engine rounds: what it recorded is the replay of what it really did, and noise."""

    def __init__(self, folder, model_dir):
        self.folder, self.model_dir = folder, model_dir
        self.temperature, self.top_p, self.top_k = 1.0, 1.0, 0
        self.states = [weights(model_dir, version, SMALL) for version in range(VERSIONS)]
        write(folder, model_dir, self, [])
        self.replayer = TransformersReplayer(model_dir, KeptVersions(folder / "versions"), Sampling())

    def audit(self, *, tagged, really=None, stale=None, alternatives=None, many=MANY):
        """`tagged` and `really` are plans of versions by token; `stale` a pattern of parameters left old."""
        source = np.random.default_rng(1)
        claims = [self._rollout(number, tagged, source) for number in range(many)]
        truth = claims if really is None else [self._retold(rollout, really) for rollout in claims]
        passes = [([*rollout.prompt_ids, *rollout.turn.token_ids], segments(rollout), ()) for rollout in truth]
        left = Stale(re.compile(stale), previous_of(range(VERSIONS))) if stale else None
        replayed = self.replayer.replay(passes, left)
        recorded = iter([x + source.normal(0, NOISE) for x in values] for values in replayed)
        made = retag([(rollout, rollout.prompt_ids) for rollout in claims], lambda _: {"logprobs": next(recorded)})
        (self.folder / ROLLOUTS_FILE).unlink()
        write(self.folder, self.model_dir, self, made, versions=(), dtype="bfloat16")
        return run(self.folder, alternatives=alternatives)

    def _rollout(self, number, plans, source):
        plan = plans[number % len(plans)]
        tokens = source.integers(2, 17, LENGTH).tolist()
        made = make_rollout("g", number, length=LENGTH, spans=spans_of(plan), token_ids=tokens)
        return msgspec.structs.replace(made, prompt_ids=source.integers(2, 17, 4).tolist())

    def _retold(self, rollout, plans):
        plan = plans[int(rollout.rollout_id.split("/")[1]) % len(plans)]
        spans = [VersionSpan(*span) for span in spans_of(plan)]
        turn = msgspec.structs.replace(
            rollout.turn, token_versions=spans, prefill_versions=[PrefillSpan(0, 0, spans[0].version)]
        )
        return msgspec.structs.replace(rollout, turn=turn)
