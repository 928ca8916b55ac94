"""A sharded model straight from its files: no rank ever holds more than one block of it whole.

The model is made without values (on torch's meta device), but for its buffers, which its classes compute. Then block by
block: the block's parameters are read from the files, and FSDP2 keeps this rank's part of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from inflight.models.weight_files import INDEX, WHOLE
from inflight.trainer.loading import load_model, ready


def to_shard(
    directory: Path, dtype: torch.dtype, *, attention: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Callable[[nn.Module], None]]:
    """The model of a directory, and what gives a part of it its values right before that part is sharded.

    Where the files have other names for the weights, or lack one, only transformers can load them: then the model is
    whole already, on the CPU. Raises OSError or ValueError when it can't be loaded.
    """
    model = blank_model(directory, dtype, attention=attention, trust_remote_code=trust_remote_code)
    files = WeightFiles(directory, model)
    if files.cover():
        return model, files.fill
    cpu = torch.device("cpu")
    whole = load_model(directory, dtype, cpu, attention=attention, trust_remote_code=trust_remote_code)
    return whole, _filled


def _filled(_: nn.Module) -> None:
    """Fills nothing: transformers has read the weights already."""


def blank_model(
    directory: Path, dtype: torch.dtype, *, attention: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a directory, in evaluation mode, without the values of its parameters; tied ones are one.

    Raises OSError or ValueError when the directory holds no model, or its logits are not plain.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.tie_weights()  # what was tied inside is two by now: each was put on the meta device for itself
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return ready(model)


class WeightFiles:
    """The tensors of a model directory, read one at a time; `fill` gives them to the parameters of a blank model."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        """Raises OSError or ValueError when the files can't be read."""
        self._directory = directory
        self._files = {name: directory / file for name, file in _index(directory).items()}
        self._prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._names = list(names.values())
        """Of each parameter all names; several where it is tied."""
        self._filled: dict[str, nn.Parameter] = {}

    def cover(self) -> bool:
        """Whether each parameter is there under its own name. Otherwise transformers converts names as it loads."""
        return all(any(name in self._files for name in names) for names in self._names)

    def fill(self, root: nn.Module) -> None:
        """Gives `root`'s parameters, those without values, and its persistent buffers what the files hold, on the CPU.

        Raises ValueError when a tensor has another shape or can't be read.
        """
        for module in root.modules():
            prefix = self._prefixes.get(id(module))
            if prefix is None:  # not the model's: what wraps it
                continue
            for name, parameter in list(module.named_parameters(prefix, recurse=False)):
                if parameter.is_meta:
                    setattr(module, name.rpartition(".")[2], self._parameter(name, parameter))
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name in self._files:
                    buffer.copy_(self._read(name, buffer))

    def _parameter(self, name: str, blank: nn.Parameter) -> nn.Parameter:
        names = next(names for names in self._names if name in names)
        if names[0] not in self._filled:
            there = next(each for each in names if each in self._files)
            values = self._read(there, blank).to(blank.dtype)
            self._filled[names[0]] = nn.Parameter(values, requires_grad=blank.requires_grad)
        parameter = self._filled[names[0]]
        if len(names) == 1:
            del self._filled[names[0]]  # a block that was sharded is not kept whole here
        return parameter

    def _read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._directory} can't be loaded: {error}") from None
        if tensor.shape != like.shape:
            raise ValueError(f"{self._directory} can't be loaded: its weights do not have {name}, or in another shape")
        return tensor


def _index(directory: Path) -> dict[str, str]:
    """Tensor → file. Empty where there are no safetensors. Raises OSError or ValueError when they can't be read."""
    if (directory / INDEX).is_file():
        try:
            return dict(json.loads((directory / INDEX).read_text())["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{directory / INDEX} can't be read: {error!r}") from None
    if not (directory / WHOLE).is_file():
        return {}
    try:
        with safe_open(directory / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)
    except SafetensorError as error:
        raise ValueError(f"{directory} can't be loaded: {error}") from None
