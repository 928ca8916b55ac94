"""`inflight audit RUN`: from a run folder to a report and an exit code."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from transformers import AutoConfig

from inflight.audit.alternatives import STANDARD, Alternative, by_name
from inflight.audit.compare import Auditor
from inflight.audit.replay import AuditError, KeptVersions, Replayer, TransformersReplayer
from inflight.audit.report import AuditReport, text
from inflight.config import ConfigError, load
from inflight.models import ModelError, prepare
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.stream import Reader, StreamError
from inflight.sampling import Sampling
from inflight.types import Rollout

AUDIT_FILE = "audit.json"
EXACT_TOLERANCE = 1e-4
"""Nats, for float32 runs: rounding alone stays below 1e-5 on the models that were tried."""
THROUGH = ("transformers", "engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every tag that was checked is right, 1 when not, 2 when the run can't be audited."""
    parser = argparse.ArgumentParser(prog="inflight audit", description="Check every version tag of a run.")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        report = run(
            arguments.run_dir,
            tolerance=arguments.tolerance,
            alternatives=arguments.alternatives,
            dtype=arguments.dtype,
            limit=arguments.limit,
            token_by_token=arguments.token_by_token,
            threads=arguments.threads,
            through=arguments.through,
            device=arguments.device,
        )
    except (AuditError, ConfigError, ModelError, StreamError, OSError) as error:
        print(f"inflight audit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(text(report))
    return 0 if report.passed else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument("run_dir", type=Path, help="a run that kept its versions (audit.keep_versions=true)")
    parser.add_argument(
        "--tolerance",
        type=_above(0.0, float),
        help=f"largest difference allowed, in nats (float32 runs: {EXACT_TOLERANCE:g})",
    )
    parser.add_argument(
        "--alternatives",
        help="stories to test, such as late,old,layer.3, or none (default: none for float32, else all but layer.K)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="what the replay computes in (default: float32)")
    parser.add_argument(
        "--limit", type=_above(0, int), help="replay this many rollouts, drawn at random with a fixed seed"
    )
    parser.add_argument(
        "--token-by-token", action="store_true", help="a forward pass for each token, as an engine does"
    )
    parser.add_argument("--threads", type=_above(0, int), help="CPU threads")
    parser.add_argument("--device", help="where the replay runs: cpu (default), cuda, cuda:1, …")
    parser.add_argument(
        "--through", choices=THROUGH, default=THROUGH[0],
        help="what replays: another implementation, or the kernels that recorded, which round alike (bfloat16 on CPU)",
    )  # fmt: skip


def _above(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argument's type: a finite number above `least`."""

    def read(text: str) -> float:
        number = kind(text)
        if not least < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above {least:g} and finite")
        return number

    read.__name__ = kind.__name__  # argparse names it for what is no number
    return read


def run(
    run_dir: Path,
    *,
    tolerance: float | None = None,
    alternatives: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    token_by_token: bool = False,
    threads: int | None = None,
    through: str = "transformers",
    device: str | None = None,
) -> AuditReport:
    """Audits a run folder and leaves the report there as audit.json. The engine has its own dtype, device and passes.

    Raises ConfigError, AuditError, StreamError, ModelError or OSError when there is nothing that can be audited.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    config = load(run_dir)
    if through == "engine":
        _require_engines_own(dtype=dtype, device=device, token_by_token=token_by_token)
        dtype = config.model.dtype
    dtype = dtype or "float32"
    exact = config.model.dtype == "float32" and dtype == "float32"
    rollouts, torn = _rollouts(run_dir / ROLLOUTS_FILE, limit)
    kept = KeptVersions(config.version_file(0).parent)
    if not any(kept.folder.glob("*.safetensors")):
        raise AuditError(f"{kept.folder} holds no versions: the run must be started with audit.keep_versions=true")
    sampling = Sampling.of(config.rollout)
    if sampling.penalises:
        raise AuditError("the run was sampled with penalties, which a replay does not know of")
    model_dir = prepare(config.model.name)
    stories = _alternatives(alternatives, exact, model_dir)
    replayer: Replayer
    if through == "engine":
        from inflight.audit.engine import EngineReplayer  # late: it needs vLLM

        lengths = [len(rollout.prompt_ids) + len(rollout.turn.token_ids) for rollout in rollouts]
        replayer = EngineReplayer(model_dir, kept, sampling, config, lengths=lengths)
    else:
        replayer = TransformersReplayer(
            model_dir, kept, sampling, dtype=DTYPES[dtype], token_by_token=token_by_token, device=device or "cpu"
        )
    report = Auditor(replayer, kept).audit(
        rollouts,
        run=str(run_dir),
        dtype=dtype,
        tolerance=EXACT_TOLERANCE if tolerance is None and exact else tolerance,
        alternatives=stories,
        torn_tail=torn,
    )
    (Path(run_dir) / AUDIT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def _rollouts(path: Path, limit: int | None) -> tuple[list[Rollout], str | None]:
    if not path.is_file():
        raise AuditError(f"{path} does not exist: the run must be started with rollout.keep=true")
    reader = Reader(path)
    if limit is None:
        return [rollout for group in reader for rollout in group.rollouts], reader.torn
    there = sum(len(group.rollouts) for group in reader)  # read twice: a long run's rollouts fill a machine's memory
    chosen = set(random.Random(0).sample(range(there), min(limit, there)))
    numbered = enumerate(rollout for group in reader for rollout in group.rollouts)
    return [rollout for number, rollout in numbered if number in chosen], reader.torn


def _require_engines_own(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise AuditError(f"--{name.replace('_', '-')} does not go with --through engine, which has its own")


def _alternatives(names: str | None, exact: bool, model_dir: Path) -> list[Alternative]:
    if names is None:
        return [] if exact else list(STANDARD)
    layers = AutoConfig.from_pretrained(model_dir).get_text_config().num_hidden_layers
    try:
        return [by_name(name, layers) for name in names.split(",") if name != "none"]
    except ValueError as error:
        raise AuditError(f"--alternatives: {error}") from None
