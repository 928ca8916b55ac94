"""`generator.server`: what of vLLM's HTTP server a run may set, by name before vLLM is imported, by value with it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from inflight.config import ConfigError
from inflight.generator.engine_args import OWN, server_arguments
from inflight.generator.server_args import ALLOWED, REFUSED, _server_arguments, require_server, server_values

FINE = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def test_parsers_and_templates_are_allowed():
    require_server({}, {})
    require_server(FINE | {"chat_template": "x.jinja", "enable_prompt_tokens_details": True}, {"block_size": 32})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": 8000}, r"server\.port is not allowed: inflight chooses the address"),
        ({"uds": "/s"}, "server.uds is not allowed"),
        ({"root_path": "/x"}, "server.root_path is not allowed"),
        ({"api_key": ["k"]}, "api_key is not allowed: inflight makes a key"),
        ({"middleware": ["m"]}, "middleware is not allowed: it could answer in place of the server"),
        ({"ssl_keyfile": "k"}, "ssl_keyfile is not allowed: inflight runs the HTTP server itself"),
        ({"tokens_only": True}, "tokens_only is not allowed: its answers would have no version tags"),
        ({"lora_modules": ["a=b"]}, "lora_modules is not allowed"),
        ({"trust_request_mm_kwargs": True}, "it was not checked"),
        (
            {"tool_cal_parser": "hermes"},
            "not an argument of this vLLM's server, tool_call_parser is",
        ),
        ({"block_size": 32}, "block_size is not an argument of this vLLM's server"),
        ({"enable_auto_tool_choice": True}, "needs generator.server.tool_call_parser"),
    ],
)
def test_what_would_break_tags_or_control_is_refused_by_name(given, says):
    with pytest.raises(ConfigError, match=says):
        require_server(given, {})


def test_one_that_is_set_twice_is_refused():
    with pytest.raises(ConfigError, match=r"is set by generator\.extra\.reasoning_parser as well"):
        require_server({"reasoning_parser": "qwen3"}, {"reasoning_parser": "qwen3"})


def test_each_argument_of_this_vllm_was_looked_at():
    """A new one is neither allowed nor refused with a reason: it has to be put into one of the tables."""
    assert _server_arguments() - ALLOWED - REFUSED.keys() == {
        "trust_request_mm_kwargs",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
        "enable_flash_late_interaction",
    }
    assert not ALLOWED & (REFUSED.keys() | OWN.keys())


def parser():
    known = argparse.ArgumentParser()
    known.add_argument("--tool-call-parser")
    known.add_argument("--host")
    known.add_argument("--uvicorn-log-level")
    known.add_argument("--disable-uvicorn-access-log", action="store_true")
    known.add_argument("--enable-auto-tool-choice", action="store_true")
    known.add_argument("--default-chat-template-kwargs", type=json.loads)
    known.add_argument("--chat-template-content-format", choices=["auto", "string"], default="auto")
    return known


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable_auto_tool_choice": "yes"}, "enable_auto_tool_choice='yes' is not allowed: true or false"),
        ({"chat_template_content_format": "html"}, "'html' is not allowed: auto, string"),
        ({"default_chat_template_kwargs": "{"}, "default_chat_template_kwargs='{' is not allowed"),
    ],
)
def test_a_value_of_another_kind_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        server_values(parser(), given)


def test_values_reach_the_server_but_not_over_what_inflight_sets():
    given = {"default_chat_template_kwargs": '{"enable_thinking": false}', "tool_call_parser": "hermes"}
    arguments = server_arguments(parser(), {}, given)
    assert arguments.default_chat_template_kwargs == {"enable_thinking": False}
    assert arguments.tool_call_parser == "hermes"
    assert arguments.host == "127.0.0.1"


REAL = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from inflight.config import ConfigError
from inflight.generator import hooks
from inflight.generator.engine_args import server_arguments
from inflight.generator.server import _entrypoints
from inflight.generator.server_args import ALLOWED, check_parsers
parser = _entrypoints()["make_arg_parser"](FlexibleArgumentParser())
assert ALLOWED <= {action.dest for action in parser._actions}, ALLOWED - {action.dest for action in parser._actions}
for given in json.loads(sys.argv[1]):
    try:
        arguments = server_arguments(parser, {}, given)
        check_parsers(arguments, hooks.locate("make_arg_parser"))
        print("RESULT", "fine", arguments.tool_call_parser)
    except ConfigError as error:
        print("RESULT", error)
"""


@pytest.mark.vllm
def test_with_vllms_own_parser():
    cases = [
        FINE,
        {"tool_call_parser": "hermse", "enable_auto_tool_choice": True},
        {"reasoning_parser": "nobody"},
        {"chat_template": "no/such.jinja"},
        {"enable_log_outputs": True},
        {"max_log_len": "many"},
    ]
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    ended = subprocess.run(
        [sys.executable, "-c", REAL, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = [line.removeprefix("RESULT ") for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(cases), ended.stderr[-2000:]
    assert lines[0] == "fine hermes"
    assert lines[1].startswith("generator.server.tool_call_parser='hermse' is not known: ")
    assert lines[2].startswith("generator.server.reasoning_parser='nobody' is not known: ")
    assert "no/such.jinja" in lines[3]
    assert "enable-log-requests" in lines[4]
    assert lines[5].startswith("generator.server.max_log_len='many' is not allowed")
