"""`inflight audit RUN`: from a run folder to a report and an exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig

from inflight.agreement import arithmetic
from inflight.audit import counts
from inflight.audit.alternatives import STANDARD, Alternative, by_name
from inflight.audit.compare import Auditor
from inflight.audit.record import RecordedRollouts, read
from inflight.audit.replay import AuditError, KeptVersions, Replayer, TransformersReplayer
from inflight.audit.report import AuditOutcome, AuditReport, Completeness
from inflight.audit.text import text
from inflight.config import ConfigError, RunConfig, Sampling, load
from inflight.config.folder import AUDIT_FILE
from inflight.exits import BAD_INPUT, say_why
from inflight.file_path import file_path
from inflight.metrics import METRICS_FILE, SUMMARY_FILE, SWAPS_FILE
from inflight.models import ModelError, prepare
from inflight.rollout.buffer import ROLLOUTS_FILE
from inflight.rollout.frames import StreamError

FAILED = 1
NOT_SHOWN = 3
"""Exit codes beside BAD_INPUT; 0 is a run that passed."""
PROGRESS_S = 5.0
THROUGH = ("transformers", "engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXAMPLES = """examples:
  inflight audit runs/mine                             through transformers: exact for float32 runs
  inflight audit runs/mine --through engine --limit 100   a bfloat16 run on a CPU, 100 of its rollouts
  inflight audit runs/mine --device cuda

Exit code: 0 passed, 1 failed (each FAULT line names a fault), 3 not shown (no fault was found, and each OPEN line says
why that is no proof), 2 nothing could be audited. audit.json in the run has the same figures. More: docs/audit.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every tag that was checked is right, 1 when something is wrong, 2 when the run can't be
    audited, 3 when no fault was found, but it is not shown that there is none."""
    parser = argparse.ArgumentParser(
        prog="inflight audit",
        description="Replay a run's rollouts, and check that each token was sampled by the version that it names.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
            no_tf32=arguments.no_tf32,
            progress=ReplayProgress(),
        )
    except (AuditError, ConfigError, ModelError, StreamError, OSError) as error:
        return say_why("audit", error, BAD_INPUT)
    print(text(report))
    return {AuditOutcome.PASSED: 0, AuditOutcome.FAILED: FAILED, AuditOutcome.NOT_SHOWN: NOT_SHOWN}[report.outcome]


class ReplayProgress:
    """Prints what is done to stderr, at most once in PROGRESS_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + PROGRESS_S

    def __call__(self, line: str) -> None:
        if (now := self._clock()) >= self._next:
            self._next = now + PROGRESS_S
            print(f"inflight audit: {line}", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument(
        "run_dir", type=file_path, metavar="RUN", help="one that kept its versions: audit.keep_versions=true"
    )
    parser.add_argument(
        "--tolerance",
        type=_above(0.0, float),
        help="largest difference allowed, in nats (default: what rounding in the run's dtype allows)",
    )
    parser.add_argument(
        "--alternatives",
        help="hypotheses to test, such as late,old,layer.3, or none (default: none for float32, else all but layer.K)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="dtype of the replay's computation (default: float32)")
    parser.add_argument(
        "--limit", type=_above(0, int), help="replay this many rollouts, drawn at random with a fixed seed"
    )
    parser.add_argument(
        "--token-by-token", action="store_true", help="a forward pass for each token, as an engine does"
    )
    parser.add_argument("--threads", type=_above(0, int), help="CPU threads")
    parser.add_argument(
        "--no-tf32", action="store_true", help="the GPUs of a float32 run were kept from TF32 (docs/audit.md)"
    )
    parser.add_argument("--device", help="where the replay runs: cpu (default), cuda, cuda:1, …")
    parser.add_argument(
        "--through",
        choices=THROUGH,
        default=THROUGH[0],
        help="what replays: another implementation, or the kernels that recorded, which round alike (bfloat16 on CPU)",
    )


def _above(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argument's type: a finite number above `least`."""

    def read(text: str) -> float:
        number = kind(text)
        if not least < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above {least:g} and finite")
        return number

    read.__name__ = kind.__name__  # argparse shows this name for text that is no number
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
    no_tf32: bool = False,
    progress: Callable[[str], object] = lambda line: None,
) -> AuditReport:
    """Audits a run folder and writes the report to audit.json there. The engine has its own dtype, device and passes.

    Raises ConfigError, AuditError, StreamError, ModelError or OSError when there is nothing that can be audited.
    """
    config = load(run_dir)
    if through == "engine":
        if config.trainer.adapter:
            raise AuditError("the versions of this run are an adapter's, which are replayed through transformers only")
        _require_engines_own(dtype=dtype, device=device, token_by_token=token_by_token, threads=threads)
        dtype = config.model.dtype
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = dtype or "float32"
    recorded_in = _arithmetic(config, no_tf32=no_tf32)
    exact = recorded_in == dtype == "float32"
    record = read(run_dir / ROLLOUTS_FILE, limit)
    kept = KeptVersions(config.version_file(0).parent)
    if not any(kept.folder.glob("*.safetensors")):
        raise AuditError(f"{kept.folder} holds no versions: the run must be started with audit.keep_versions=true")
    sampling = _replayable(config)
    model_dir = prepare(config.model.name, revision=config.model.revision)
    hypotheses = _alternatives(alternatives, exact, model_dir)
    replayer: Replayer
    if through == "engine":
        from inflight.audit.engine import EngineReplayer  # imported here, because it needs vLLM

        lengths = [len(rollout.prompt_ids) + len(rollout.turn.token_ids) for rollout in record.rollouts]
        replayer = EngineReplayer(model_dir, kept, sampling, config, lengths=lengths)
    else:
        passes = {"dtype": DTYPES[dtype], "token_by_token": token_by_token, "device": device or "cpu"}
        replayer = _through_transformers(config, model_dir, kept, sampling, passes)
    replayer.progress = progress
    replayer.rounding = recorded_in if dtype == "float32" else dtype
    report = judge(
        run_dir,
        config,
        record,
        replayer,
        kept,
        tolerance=tolerance,
        alternatives=hypotheses,
        dtype=dtype,
        recorded_in=recorded_in,
    )
    (Path(run_dir) / AUDIT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def _replayable(config: RunConfig) -> Sampling:
    """How the run sampled. Raises AuditError for what no replay supports."""
    sampling = Sampling.of(config.rollout)
    if sampling.penalises:
        raise AuditError("the run was sampled with penalties, which a replay does not support")
    if config.model.trust_remote_code:
        raise AuditError("the run's model has code of its own (model.trust_remote_code), which a replay does not load")
    return sampling


def _through_transformers(
    config: RunConfig, model_dir: Path, kept: KeptVersions, sampling: Sampling, passes: dict[str, Any]
) -> TransformersReplayer:
    """`passes`: how it computes, keyword arguments of TransformersReplayer."""
    if not config.trainer.adapter:
        return TransformersReplayer(model_dir, kept, sampling, **passes)
    from inflight.audit.adapter import AdapterReplayer

    passes = {**passes, "base_dtype": getattr(torch, config.model.dtype)}
    return AdapterReplayer(model_dir, kept, sampling, config.trainer.lora, **passes)


def judge(
    run_dir: Path,
    config: RunConfig,
    record: RecordedRollouts,
    replayer: Replayer,
    kept: KeptVersions,
    *,
    dtype: str,
    recorded_in: str,
    tolerance: float | None = None,
    alternatives: Sequence[Alternative] = (),
) -> AuditReport:
    """The report for a record of a run folder; `dtype` is that of the replay's computation, `recorded_in` that of the
    generators'."""
    report = Auditor(replayer, kept).audit(
        record.rollouts,
        run=str(run_dir),
        dtype=dtype,
        recorded_in=recorded_in,
        tolerance=tolerance,
        alternatives=alternatives,
        complete=_completeness(record, run_dir, config, kept),
    )
    recorded = record.census.rollouts
    return msgspec.structs.replace(report, drawn_from=recorded if len(record.rollouts) < recorded else None)


def _completeness(record: RecordedRollouts, run_dir: Path, config: RunConfig, kept: KeptVersions) -> Completeness:
    size = config.rollout.group_size
    start = config.start_version
    try:
        told = counts.Told.read(run_dir, kept.newest)
        unknown = counts.unknown(told)
        wrong = counts.faults(record.census, told, group_size=size, start_version=start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        names = f"{METRICS_FILE}, {SWAPS_FILE} or {SUMMARY_FILE}"
        raise AuditError(f"{run_dir}: {names} is damaged: {error!r}") from None
    if record.torn:
        unknown.append(f"the rollout file's tail is torn: {record.torn}")
    return Completeness(wrong=wrong, unknown=unknown)


def _require_engines_own(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise AuditError(f"--{name.replace('_', '-')} does not go with --through engine, which has its own")


def _arithmetic(config: RunConfig, *, no_tf32: bool) -> str:
    """The dtype in which the run's generators multiplied."""
    dtype = config.model.dtype
    found = arithmetic(dtype, cuda=config.launch.needs_gpu)
    if not no_tf32:
        return found
    if found != "tf32":
        where = "machine=gpu" if config.launch.needs_gpu else "machine=cpu"
        raise AuditError(f"--no-tf32 has no effect: the run computed in {dtype} with {where}, not in float32 on GPUs")
    return dtype


def _alternatives(names: str | None, exact: bool, model_dir: Path) -> list[Alternative]:
    if names is None:
        return [] if exact else list(STANDARD)
    layers = AutoConfig.from_pretrained(model_dir).get_text_config().num_hidden_layers
    try:
        return [by_name(name, layers) for name in names.split(",") if name != "none"]
    except ValueError as error:
        raise AuditError(f"--alternatives: {error}") from None
