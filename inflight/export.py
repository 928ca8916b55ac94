"""`inflight export RUN_OR_CHECKPOINT OUT`: the model of a checkpoint as a directory of its own, without what only a
trainer needs, in the dtype that it is to be served in."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from inflight.config import CONFIG_FILE
from inflight.exits import BAD_INPUT, heeded_signals, say_why
from inflight.file_path import file_path
from inflight.locked_folder import locked_folder
from inflight.merge import MergeError
from inflight.merge import merge as merge_adapter
from inflight.models.weight_files import ADAPTER, INDEX
from inflight.run_template import FILE as TEMPLATE
from inflight.run_template import Rendering, TemplateError, rendering_of
from inflight.trainer.checkpoint import index
from inflight.trainer.checkpoint.best import best_of
from inflight.trainer.checkpoint.companions import copy_companions, dtype_of, note_dtype, readable
from inflight.trainer.checkpoint.index import CheckpointError
from inflight.trainer.checkpoint.whole import require_whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXAMPLES = """examples:
  inflight export runs/mine out --dtype bfloat16          the newest checkpoint
  inflight export runs/mine/best/step-000040 out          the best one, of a run with eval.every
  inflight export runs/mine out --merge                   a run with trainer.lora.rank: base and adapter in one

`vllm serve out` then serves it."""


class ExportError(ValueError):
    """A model that can't be exported; one line that says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 0, or 2 with one line; 128 plus the number of a signal that ends it."""
    parser = argparse.ArgumentParser(
        prog="inflight export",
        description="Make a directory of a checkpoint's model, as transformers and vLLM load it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=file_path, metavar="RUN|CHECKPOINT", help="of a run: its newest checkpoint")
    parser.add_argument("out", type=file_path, metavar="OUT", help="the directory to make; it must not exist")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights (default: as in the checkpoint)")
    parser.add_argument("--merge", action="store_true", help="of an adapter: the base with the adapter in its weights")
    template = "(default: the one that the run has rendered its chats with)"
    parser.add_argument("--chat-template", type=file_path, metavar="FILE", help=template)
    given = parser.parse_args(argv)
    try:
        with _stopped_by_signals():
            rendering = rendering_of(given.source, given.chat_template)
            checkpoint = export(given.source, given.out, given.dtype, merge=given.merge, rendering=rendering)
    except (ExportError, CheckpointError, MergeError, TemplateError, OSError) as error:
        return say_why("export", error, BAD_INPUT)
    what = "adapter" if _is_adapter(given.out) else "model"
    own = ", with the run's chat template" if rendering.template and given.chat_template is None else ""
    print(f"{given.out}: the {what} of {checkpoint}, {_stored(given.out)}{own}{_better(given.source, checkpoint)}")
    if rendering.template and _is_adapter(given.out):  # vLLM takes the template of the base
        print(f"serve the base with --chat-template {given.out / TEMPLATE}")
    if rendering.arguments:
        arguments = shlex.quote(json.dumps(rendering.arguments))
        print(f"the run's task.options.template is not in it: serve with --default-chat-template-kwargs {arguments}")
    return 0


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """While open, Ctrl-C, SIGTERM and SIGHUP raise SystemExit, so that what is not complete is removed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(say_why("export", f"stopped by {signal.Signals(number).name}", 128 + number))

    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def export(
    source: Path,
    out: Path,
    dtype: str | None = None,
    *,
    merge: bool = False,
    rendering: Rendering | None = None,
) -> Path:
    """Makes the directory `out` of a run's newest checkpoint, or of a checkpoint; the checkpoint. Without `rendering`
    its chat template is the model's own.

    An adapter's checkpoint gives an adapter's directory, or with `merge` a model's. `out` appears complete or not at
    all, and what an export to it that was killed has left beside it is removed. Raises ExportError where there is no
    checkpoint, `out` exists, or the weights can't be read or cast; CheckpointError when they are not whole; MergeError
    when they can't be merged; OSError when it can't be written.
    """
    checkpoint = _checkpoint(source)
    if out.exists():
        raise ExportError(f"{out} exists: name a directory that does not")
    if merge and not _is_adapter(checkpoint):
        raise ExportError(f"--merge is for an adapter, and {checkpoint} holds a whole model")
    if dtype not in (None, "float32") and _is_adapter(checkpoint) and not merge:
        raise ExportError(f"--dtype {dtype} is not possible: {checkpoint} is an adapter's, in float32; --merge casts")
    try:
        stored = _stored(checkpoint)
    except (OSError, ValueError) as error:
        raise ExportError(f"the configuration in {checkpoint} can't be read: {error}") from None
    target = None if dtype in (None, stored) else dtype
    if target is not None and stored != "float32":
        raise ExportError(f"--dtype {dtype} is not possible: {checkpoint} holds weights in {stored}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(out.parent, f".{out.name}.partial-") as folder:
        partial = folder / out.name
        partial.mkdir()
        if merge:
            merge_adapter(checkpoint, partial, DTYPES[dtype or stored])
            copy_companions(checkpoint, partial)
            (partial / ADAPTER).unlink()
        else:
            _copy(checkpoint, partial, target)
        if rendering is not None:
            rendering.write(partial)
        readable(partial)
        partial.rename(out)
    return checkpoint


def _checkpoint(source: Path) -> Path:
    found = source
    if (source / CONFIG_FILE).is_file():
        newest = index.newest(source)
        if newest is None:
            raise ExportError(f"{source} has no checkpoint yet")
        found = newest
    if not _is_adapter(found) and not (found / "config.json").is_file():
        missing = f"{CONFIG_FILE} or config.json" if found == source else "config.json"
        what = "neither a run folder nor a checkpoint" if found == source else "no checkpoint"
        raise ExportError(f"{found} is {what}: it has no {missing}")
    require_whole(found)
    return found


def _better(source: Path, exported: Path) -> str:
    """The checkpoint that `inflight eval` takes of the same run, named where it is another one than the exported."""
    best = best_of(source) if (source / CONFIG_FILE).is_file() else None
    return "" if best is None or best.name == exported.name else f"; the best by held-out questions: {best}"


def _is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER).is_file()


def _stored(directory: Path) -> str:
    """The dtype of a directory's weights; an adapter's are written in float32."""
    return "float32" if _is_adapter(directory) and not (directory / "config.json").is_file() else dtype_of(directory)


def _copy(checkpoint: Path, out: Path, dtype: str | None) -> None:
    """All files but the trainer's; weights in `dtype`, None as they are."""
    trainer = Path(index.STATE_FILE).parts[0]
    nbytes = 0
    for path in sorted(each for each in checkpoint.rglob("*") if each.is_file()):
        name = path.relative_to(checkpoint)
        if name.parts[0] == trainer:
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if dtype is not None and len(name.parts) == 1 and name.suffix == ".safetensors":
            nbytes += _cast(path, out / name, DTYPES[dtype])
        else:
            shutil.copyfile(path, out / name)
    if dtype is not None:
        note_dtype(out, dtype)
        if (out / INDEX).is_file():
            values = json.loads((out / INDEX).read_bytes())
            values["metadata"] = values.get("metadata", {}) | {"total_size": nbytes}
            (out / INDEX).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(source: Path, target: Path, dtype: torch.dtype) -> int:
    """One file's tensors in another dtype; their bytes."""
    try:
        tensors = load_file(source)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(dtype)
                if torch.isfinite(tensor).all() and not torch.isfinite(tensors[name]).all():
                    raise ExportError(f"{name} in {source} does not fit into {str(dtype).removeprefix('torch.')}")
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ExportError(f"{source} can't be exported: {error}") from None
    return sum(tensor.nbytes for tensor in tensors.values())
