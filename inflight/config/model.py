"""Options of the model that all processes start from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inflight.config.checks import require, require_one_of


@dataclass(frozen=True)
class ModelConfig:
    """The model that all processes start from. `name` is a directory, a model of the Hugging Face hub (`OWNER/NAME`),
    or one of `smollm2`, `tiny`, `tiny-untied` (see inflight/models/)."""

    name: str
    revision: str = ""
    """Branch, tag or commit of a model of the hub; empty: the default branch. The launcher stores the commit here, so
    that every process, and a resumed run, has the same files."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model, with the permissions of the user who starts the run."""
    dtype: str = "bfloat16"
    """Dtype on the wire and in the generators; the trainer's master weights are float32."""
    served_name: str = ""
    """The model's name in requests to the generators; empty: `name`, as it was given to the launcher."""

    def __post_init__(self) -> None:
        require_one_of(self, "model", "dtype", ("bfloat16", "float16", "float32"))
        fits = re.fullmatch(r"[\w./+-]{0,255}", self.revision) is not None
        require(fits, "model.revision", self.revision, "a branch, a tag or a commit")
