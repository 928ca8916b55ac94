"""Arguments of vLLM's HTTP server that a run may give (`generator.server`): which ones, and why not others."""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inflight.config import ConfigError
from inflight.error_line import one_line
from inflight.generator import hooks
from inflight.nearest_name import nearest as nearest_name

_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
ENGINE_SIDE = ("reasoning_parser", "reasoning_parser_plugin", "enable_log_requests")
"""Arguments of vLLM's engine that only its server uses."""
ALLOWED = {
    *ENGINE_SIDE,
    "chat_template",
    "chat_template_content_format",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "response_role",
    "return_tokens_as_token_ids",
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "tool_call_parser",
    "tool_parser_plugin",
    "tool_strict_level",
    "max_log_len",
    "enable_prompt_tokens_details",
    "enable_per_request_metrics",
    "enable_server_load_tracking",
    "enable_force_include_usage",
    "sse_keep_alive_interval",
    "enable_tokenizer_info_endpoint",
    "enable_log_outputs",
    "enable_log_deltas",
    "log_error_stack",
    "fingerprint_mode",
    "fingerprint_value",
    "enable_request_id_headers",
    "disable_fastapi_docs",
    "enable_offline_docs",
    "allow_credentials",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "cohere_is_reasoning_model",
    "cohere_format",
    "anthropic_disabled_thinking_effort",
}
_ADDRESS = "inflight chooses the address and tells clients through routes.json"
_OWN_HTTP = "inflight runs the HTTP server itself, on loopback, and that does not read it"
_ONE = "a generator is one server with one engine; generator.count gives more of them"
_TAGS = "its answers would have no version tags"
REFUSED = {
    "host": _ADDRESS,
    "port": _ADDRESS,
    "uds": _ADDRESS,
    "root_path": _ADDRESS,
    "grpc": _ADDRESS,
    "grpc_port": _ADDRESS,
    "api_key": "inflight makes a key for each start of a run (bus/api.key)",
    "middleware": "it could answer in place of the server, without version tags",
    "lora_modules": "adapters belong to the weights that they were trained with",
    "tokens_only": _TAGS,
    "enable_scale_out": _TAGS,
    "tool_server": "it runs code that the model writes",
    "headless": _ONE,
    "api_server_count": _ONE,
    "data_parallel_supervisor_port": _ONE,
    "config": "everything is in the run's own configuration",
    "model_tag": "model.name sets it",
    **dict.fromkeys(
        (
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_ciphers",
            "enable_ssl_refresh",
            "uvicorn_log_level",
            "disable_uvicorn_access_log",
            "disable_access_log_for_endpoints",
            "h11_max_incomplete_event_size",
            "h11_max_header_count",
        ),
        _OWN_HTTP,
    ),
}
"""Arguments that would break the tags or inflight's control of the server, and why."""


def require_server(given: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key of `generator.server` that is refused, unknown to the installed vLLM, or in
    `generator.extra` too. Reads vLLM's source, because importing it takes many seconds."""
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"generator.server.{name} is not allowed: {REFUSED[name]}")
    known = {*_server_arguments(), *ENGINE_SIDE} if given else set[str]()
    for name in given:
        if name not in known:
            near = nearest(name, known & ALLOWED)
            raise ConfigError(f"generator.server.{name} is not an argument of this vLLM's server{near}")
        if name not in ALLOWED:
            raise ConfigError(
                f"generator.server.{name} is not allowed: it was not checked that tags stay right with it"
            )
        if name in extra:
            raise ConfigError(f"generator.server.{name} is set by generator.extra.{name} as well: leave one out")
    if given.get("enable_auto_tool_choice") and not given.get("tool_call_parser"):
        raise ConfigError("generator.server.enable_auto_tool_choice needs generator.server.tool_call_parser")


def _server_arguments() -> set[str]:
    """The fields of vLLM's FrontendArgs."""
    try:
        module = hooks.locate("make_arg_parser")
    except hooks.HookChanged as error:
        raise ConfigError(f"generator.server can't be used: {error}") from None
    return fields_of(module, _CLASSES)


def fields_of(module: str, classes: Sequence[str]) -> set[str]:
    """The annotated fields of classes in a module of the installed vLLM, from its source."""
    path = hooks.package().joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = [node for node in body if isinstance(node, ast.ClassDef) and node.name in classes]
    fields = [line for each in found for line in each.body if isinstance(line, ast.AnnAssign)]
    return {field.target.id for field in fields if isinstance(field.target, ast.Name)}


def nearest(name: str, known: Iterable[str]) -> str:
    """For the end of an error about an unknown name: the known one that is most like it, if one is."""
    return f", {found} is" if (found := nearest_name(name, known)) else ""


def server_values(parser: argparse.ArgumentParser, given: Mapping[str, Any]) -> dict[str, Any]:
    """`generator.server` as vLLM's parser would have it. Raises ConfigError for a value of another type or choice."""
    actions = {action.dest: action for action in parser._actions}
    return {name: _value(actions[name], name, value) for name, value in given.items() if name in actions}


def _value(action: argparse.Action, name: str, value: Any) -> Any:
    place = f"generator.server.{name}={value!r} is not allowed"
    if isinstance(action.default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: true or false")
        return value
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{place}: {', '.join(map(str, action.choices))}")
    if isinstance(value, str) and callable(action.type):
        try:
            return action.type(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{place}: {error}") from None
    return value


def check_parsers(arguments: argparse.Namespace, module: str) -> None:
    """Loads plugins of parsers and has vLLM check what it checks of its own command line, by a function of `module`.

    Raises ConfigError for a parser or a chat template that does not exist.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name, load in (
        ("tool_parser_plugin", ToolParserManager.import_tool_parser),
        ("reasoning_parser_plugin", ReasoningParserManager.import_reasoning_parser),
    ):
        if path := getattr(arguments, name, None):
            load(path)  # one that can't be imported is logged, and its parser is not known below
    for name, manager in (("tool_call_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        chosen = getattr(arguments, name, None)
        known = list(manager.list_registered())
        if chosen and chosen not in known:
            raise ConfigError(f"generator.server.{name}={chosen!r} is not known: {', '.join(sorted(known))}")
    check = getattr(importlib.import_module(module), "validate_parsed_serve_args", None)
    try:
        if check is not None:
            check(arguments)
    except Exception as error:  # noqa: BLE001 - it has several classes of its own for bad values
        raise ConfigError(f"generator.server: {one_line(error)}") from None
