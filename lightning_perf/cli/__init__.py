"""The command ``lightning-perf``: a function per subcommand."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_perf.checks import install_command
from lightning_perf.errors import PerfWarning, did_you_mean, redacted
from lightning_perf.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The module of each command, imported when one runs since its dependencies may be missing.
_COMMANDS = {
    "capture": "training", "compare": "runs", "devices": "machine", "doctor": "machine",
    "measure": "machine", "report": "runs", "run": "training", "trace": "files",
    "upload": "files", "watch": "training",
}  # fmt: skip
#: The names to install of packages that are imported under another name.
_INSTALLS = {
    "jsonargparse": '"jsonargparse[signatures]"',
    "pynvml": "nvidia-ml-py",
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow"),
}


_formatwarning = warnings.formatwarning
#: The name of an argument, or the names of an option, and further options of argparse.
Argument = tuple[str, dict[str, Any]]


@dataclass
class Command:
    """A subcommand: a function that returns the exit code, or raises `Failure`."""

    arguments: Sequence[Argument]
    #: Takes the arguments' values; its docstring is the description.
    run: Callable[..., int]


def command(*arguments: Argument) -> Callable[[Callable[..., int]], Command]:
    """Make a function a subcommand with these arguments."""
    return partial(Command, arguments)


def argument(name: str, text: str, **options: Any) -> Argument:
    """An argument of a command, with further options of ``argparse``."""
    text = text.replace("%", "%%")
    if options.get("default") is not None:
        text += " (default: %(default)s)"
    return name, {"help": text, **options}


def flag(name: str, text: str) -> Argument:
    """An option without a value."""
    return name, {"action": "store_true", "help": text}


#: Options of several commands.
JSON = flag("--json", "Print JSON.")
TRACKING_URI = argument(
    "--tracking-uri",
    "The MLflow tracking address; by default MLFLOW_TRACKING_URI, or ./mlflow.db.",
    metavar="ADDRESS",
)


class Failure(Exception):
    """Ends a command with a message, without a full stop, and an exit code."""

    def __init__(self, why: object, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


def print_json(content: object) -> None:
    """Print what ``--json`` asks for."""
    say(json.dumps(content, indent=1))


def main(args: list[str] | None = None) -> None:
    """Run the command, and exit.

    The exit code is 0 for success, also if the reader of the output ends first; 1 if the command
    could not do what was asked; 2 for wrong arguments, missing packages and runs that cannot be
    read; and 130 for Ctrl-C.

    Args:
        args: The arguments after ``lightning-perf``; by default from the command line.
    """
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # closed, as with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):  # names may have characters that it cannot encode
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _one_line
    try:
        try:
            code = _run(sys.argv[1:] if args is None else args)
        finally:  # --help and --version exit, too
            sys.stdout.flush()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "lightning_perf":
            raise
        say(f"lightning-perf: {_remedy(error, package)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        _discard_output()
        code = 0
    sys.exit(code)


def _one_line(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """A warning of ours without its place in our code, others as Python has them."""
    if issubclass(category, PerfWarning):
        return f"{message}\n"
    return _formatwarning(message, category, *place, **line)


def _remedy(error: ImportError, package: str) -> str:
    if isinstance(error, ModuleNotFoundError) and package:
        install = install_command(_INSTALLS.get(package, package))
        return f"the package {package} is missing. Try {install}."
    return f"a package cannot be imported ({error}). Try pip install --upgrade lightning_perf."


def _commands() -> dict[str, Command]:
    modules = {name: import_module(f"{__name__}.{module}") for name, module in _COMMANDS.items()}
    return {name: getattr(module, name) for name, module in modules.items()}


def _run(args: Sequence[str]) -> int:
    from lightning_perf import __version__

    parser = _Parser(
        prog="lightning-perf",
        description="Measures how fast PyTorch Lightning trains, as a share of what the hardware "
        "can do, and shows why it is not faster.",
        epilog="Exit codes: 0 success; 1 the command could not do it; 2 wrong arguments, a missing "
        "package, or a run that cannot be read; 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    if find_spec("shtab"):
        import shtab

        shtab.add_argument_to(parser, "--print-completion")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="subcommand")
    commands = _commands()
    for name, command in commands.items():
        _add(subcommands, name, command)
    if not args:
        parser.print_help(sys.stderr)
        return 2
    args = _separated(args)
    # What follows two dashes is the command of `run`, whose options are not ours.
    end = args.index("--") if "--" in args else len(args)
    chosen, unknown = parser.parse_known_args([_dashed(each) for each in args[:end]])
    settings = vars(chosen)
    name = settings.pop("subcommand")
    settings.pop("print_completion", None)
    if unknown:
        subcommands.choices[name].error(f"there is no option {unknown[0]}")
    if end < len(args):
        if name != "run":
            parser.error(f"{name} takes no command after --")
        settings["command"] = args[end + 1 :]
    try:
        code: int = commands[name].run(**settings)
    # The reader, such as head, has ended; rich exits then. A comparison must not pass so.
    except (BrokenPipeError, SystemExit):
        _discard_output()
        code = int(name == "compare")
    except (Failure, LookupError, OSError) as error:
        why = str(error).rstrip(".")
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename}: {error.strerror}"
        why = redacted(why)  # it may name an address as the run
        say(f"lightning-perf {name}: {why}{'' if why.endswith('?') else '.'}", file=sys.stderr)
        code = error.code if isinstance(error, Failure) else 2
    return code


class _Parser(ArgumentParser):
    """A parser whose errors are one line, with the nearest name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument COMMAND: invalid choice: '([^']*)'", message)
        option = re.match(r"there is no option (-\S+)", message)
        message = re.sub(
            r"argument (.*): invalid int value: '(.*)'", r"\1 \2 is not a number", message
        )
        advice = f"Try {self.prog} --help"
        if choice:
            message = f"there is no command {choice[1]}"
        known = _COMMANDS if choice else self._option_string_actions
        wrong = choice or option
        if wrong:
            advice = did_you_mean(wrong[1], known, advice)
        self.exit(2, f"{self.prog}: {message}. {advice}\n")


def _add(subcommands: Any, name: str, command: Command) -> None:
    """Add a subcommand to the parser."""
    description = " ".join((command.run.__doc__ or "").split())
    summary = description.partition(". ")[0].rstrip(".")
    parser = subcommands.add_parser(name, help=summary, description=description)
    if name == "run":
        parser.usage = "%(prog)s [--config FILE] [--] COMMAND"
    for names, options in command.arguments:
        parser.add_argument(*names.split(), **options)


def _separated(args: Sequence[str]) -> list[str]:
    """The arguments, with two dashes before the command of `run`."""
    args = list(args)
    if args[0] != "run":
        return args
    at = 1
    while at < len(args) and args[at].startswith("-") and args[at] != "--":
        at += 1 + (args[at] == "--config")
    return args if args[at : at + 1] == ["--"] else [*args[:at], "--", *args[at:]]


def _dashed(argument: str) -> str:
    """An option with dashes, however it is written."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def _discard_output() -> None:
    """Write nothing more, also when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
