"""The `inflight` command. Each subcommand imports what it needs when it runs, so that the others stay fast."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from inflight import __version__
from inflight.error_line import one_line
from inflight.exits import BAD_INPUT, say_why
from inflight.nearest_name import meant

EXAMPLES = """examples:
  inflight doctor --config-name demo                  can this machine do such a run, and what to do if not
  inflight launch --config-name demo trainer.steps=100
  inflight watch runs/mine                            its live view, from another terminal
  inflight show runs/mine q5                          which version sampled which token of question 5
  inflight report runs/mine --html                    curves and version bands, in one file
  inflight trace runs/mine                            what happened when, for ui.perfetto.dev
  inflight audit runs/mine                            were the versions that the tokens carry the true ones

inflight COMMAND --help has the options of a command. Your own model, data or reward: docs/own_model.md;
a trainer: docs/own_trainer.md; a fork of vLLM: docs/own_vllm.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code; bad input is one line on stderr and code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="inflight",
        description="Update the weights of running vLLM generators without stopping them, for RL post-training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _) in _COMMANDS.items():
        # The rest belongs to the subcommand, which has its own --help.
        commands.add_parser(name, help=summary, add_help=False)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        known = meant(arguments[0], _COMMANDS) or f"the commands are {', '.join(_COMMANDS)}"
        parser.error(f"{one_line(arguments[0], 100)} is not a command; {known}")
    command = parser.parse_args(arguments[:1]).command
    try:
        code = _COMMANDS[command][1](arguments[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # while a command is loading; those that start or write something handle it themselves
        return say_why(command, "stopped by SIGINT", 128 + signal.SIGINT)
    except BrokenPipeError:  # for example `inflight report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own flush at exit fails
        return 128 + signal.SIGPIPE
    return code


def _launch(arguments: list[str]) -> int:
    from inflight.launcher import launch

    return launch.main(arguments)


def _audit(arguments: list[str]) -> int:
    from inflight import audit

    return audit.main(arguments)


def _report(arguments: list[str]) -> int:
    from inflight.report import command

    return command.main(arguments)


def _trace(arguments: list[str]) -> int:
    from inflight.report import trace

    return trace.main(arguments)


def _show(arguments: list[str]) -> int:
    from inflight.report import show

    return show.main(arguments)


def _watch(arguments: list[str]) -> int:
    from inflight.view import watch

    return watch.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from inflight.doctor import command

    return command.main(arguments)


def _eval(arguments: list[str]) -> int:
    from inflight.launcher import evaluate

    return evaluate.main(arguments)


def _patch(arguments: list[str]) -> int:
    from inflight.patching import command

    return command.main(arguments)


def _model(arguments: list[str]) -> int:
    from inflight import models

    parser = argparse.ArgumentParser(prog="inflight model", description="Prepare a model and print its directory.")
    parser.add_argument("name", help="OWNER/NAME of the Hugging Face hub, a directory, or smollm2, tiny, tiny-untied")
    parser.add_argument("--revision", default="", help="branch, tag or commit of the hub (default: its main branch)")
    parser.add_argument("--trust-remote-code", action="store_true", help="also the model's own Python code")
    given = parser.parse_args(arguments)
    try:
        commit = models.fetch(given.name, given.revision, trust_remote_code=given.trust_remote_code)
        print(models.prepare(given.name, revision=commit))
    except models.ModelError as error:
        return say_why("model", error, BAD_INPUT)
    return 0


def _export(arguments: list[str]) -> int:
    from inflight import export

    return export.main(arguments)


def _join(arguments: list[str]) -> int:
    from inflight.hosted import join

    return join.main(arguments)


def _version(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="inflight version", description="Print the version.").parse_args(arguments)
    print(f"inflight {__version__}")
    return 0


_COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "launch": ("start a run: inflight launch --config-name demo [trainer.steps=10 ...]", _launch),
    "watch": ("the live view of a run that was started elsewhere", _watch),
    "join": ("offer this host to a run: inflight join ADDRESS", _join),
    "audit": ("replay a run's rollouts and check each token's version", _audit),
    "report": ("the results of a run, and figures of its tokens by lag", _report),
    "eval": ("answer a run's held-out questions with a checkpoint", _eval),
    "show": ("a run's rollouts, and which version sampled which token", _show),
    "trace": ("what happened when in a run, for Perfetto or Chrome", _trace),
    "doctor": ("check this machine, and say what to do", _doctor),
    "patch": ("check, apply or revert the diff on the installed vLLM", _patch),
    "export": ("make a directory of a checkpoint's model: inflight export RUN OUT [--dtype bfloat16]", _export),
    "model": ("prepare a model and print its directory", _model),
    "version": ("print the version", _version),
}


if __name__ == "__main__":
    sys.exit(main())
