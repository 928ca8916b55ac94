"""Rewards by name: built in, `package.module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from inflight.config import ConfigError, RewardConfig
from inflight.config.checks import raised, require_takes
from inflight.error_line import one_line
from inflight.nearest_name import meant
from inflight.rewards.base import RESERVED, Reward, RewardError, RewardFunction, Samples

__all__ = ["RESERVED", "REWARDS", "Reward", "RewardError", "Samples", "make", "make_all"]

REWARDS = {
    "exact_match": "inflight.rewards.match:ExactMatch",
    "format": "inflight.rewards.structure:Format",
    "judge": "inflight.rewards.judge:Judge",
    "length": "inflight.rewards.structure:Length",
    "math": "inflight.rewards.mathematics:Math",
    "numeric_match": "inflight.rewards.match:NumericMatch",
    "overlong": "inflight.rewards.structure:Overlong",
    "regex": "inflight.rewards.match:Regex",
}


def make_all(configs: Sequence[RewardConfig]) -> list[Reward]:
    """The rewards of a run, without the task's own score. Raises ConfigError naming what can't be used and why."""
    return [make(config, f"rewards[{index}]") for index, config in enumerate(configs) if not config.is_task]


def make(config: RewardConfig, place: str) -> Reward:
    """A reward by its configuration, at `place`; its module is imported only now.

    A class is constructed with the options; a function gets them as keyword arguments. Raises ConfigError.
    """
    found = _find(config.name, place)
    if inspect.isclass(found):
        function = _constructed(found, config, place)
        parameters = _parameters(function.__call__, place)
        asynchronous = inspect.iscoroutinefunction(function.__call__)
        given: Mapping[str, Any] = {}
    else:
        function = found
        given = config.options
        parameters = _parameters(found, place)
        asynchronous = inspect.iscoroutinefunction(found)
        _check_options(parameters, given, place)
    bound = _bound(function, parameters, given, asynchronous)
    return dataclasses.replace(bound, files=_own_files(config.name, found))


def _own_files(name: str, found: Callable[..., Any]) -> frozenset[str]:
    """Of the module that is named and of the one in which the function is defined; none of what is built in."""
    if ":" not in name:
        return frozenset()
    modules = (_module(name.rpartition(":")[0]), sys.modules.get(str(getattr(found, "__module__", ""))))
    return frozenset(file for each in modules if (file := getattr(each, "__file__", None)))


def _bound(function: RewardFunction, parameters: Any, given: Mapping[str, Any], asynchronous: bool) -> Reward:
    free = [each for each in parameters if each.name not in given]
    catches_all = any(each.kind is each.VAR_KEYWORD for each in free)
    named = {each.name for each in free if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    required = {each.name for each in free if each.default is each.empty and each.name in named}
    column = getattr(function, "column", None)
    needs = required | ({column} if isinstance(column, str) else set()) | getattr(function, "needs", frozenset())
    return Reward(
        function=(lambda **arguments: function(**{**arguments, **given})) if given else function,
        takes=None if catches_all else frozenset(named),
        needs=frozenset(needs) - set(RESERVED),
        refuses=_own_name(function) - named if catches_all else frozenset(),
        asynchronous=asynchronous,
    )


def _own_name(function: RewardFunction) -> frozenset[str]:
    """The name, `self` mostly, by which `__call__` of an object is given that object; none where it is for that alone
    (`def __call__(self, /, ...)`), or of a plain function."""
    call = type(function).__call__
    first = next(iter(inspect.signature(call).parameters.values()), None) if inspect.isfunction(call) else None
    if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD:
        return frozenset()
    return frozenset({first.name})


def _find(name: str, place: str) -> Callable[..., Any]:
    module, _, attribute = (name if ":" in name else REWARDS.get(name, "")).rpartition(":")
    if not module or not attribute:
        names = (*REWARDS, "task")
        known = meant(name, names) or f"{', '.join(names)}, package.module:function or path/to/file.py:function"
        raise ConfigError(f"{place}.name={name!r} is not known: {known}")
    try:
        loaded = _module(module)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"{place}.name={name!r} can't be imported: {one_line(error)}") from None
    except (Exception, SystemExit) as error:  # foreign code
        raise ConfigError(f"{place}.name={name!r} can't be imported: {raised(error)}") from error
    found = getattr(loaded, attribute, None)
    if not callable(found):
        raise ConfigError(f"{place}.name={name!r}: {module} has no function {attribute}")
    return found  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    """A module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    if not path.is_file():
        raise ImportError(f"{path} is not a file")
    own = f"inflight_reward_{blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()}"
    if own in sys.modules:
        return sys.modules[own]
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return module


def _parameters(function: Callable[..., Any], place: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise ConfigError(f"{place}.name: its parameters can't be read: write a function in Python") from None


def _check_options(parameters: Sequence[inspect.Parameter], options: Mapping[str, Any], place: str) -> None:
    """Of a function: an option is one of its named parameters, and none that every question has."""
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    known = [name for name in named if name not in RESERVED]
    for name in options:
        if name not in known:
            _refuse_option(name, known, place)
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY:
            raise ConfigError(f"{place}.name: its parameter {each.name} can't be given by name")


def _refuse_option(name: str, known: Sequence[str], place: str) -> NoReturn:
    names = meant(name, known) or ", ".join(known) or "it has none"
    raise ConfigError(f"{place}.options.{name} is not an option: {names}")


def _constructed(kind: type[Any], config: RewardConfig, place: str) -> Any:
    if not dataclasses.is_dataclass(kind) or "__call__" not in dir(kind):
        raise ConfigError(f"{place}.name={config.name!r} is a class, but no dataclass with __call__")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name, value in config.options.items():
        if name not in fields:
            _refuse_option(name, list(fields), place)
        require_takes(fields[name], kind, value, f"{place}.options.{name}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in config.options:
            raise ConfigError(f"{place}.options.{name} is missing: {config.name} needs it")
    try:
        return kind(**config.options)
    except ConfigError as error:
        raise ConfigError(f"{place} ({config.name}): {error}") from None
    except (Exception, SystemExit) as error:  # foreign code
        raise ConfigError(f"{place}.name={config.name!r} can't be made: {raised(error)}") from error
