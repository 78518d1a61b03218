"""The command ``lightning-perf``: a function per subcommand."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_perf.checks import install_command
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


def argument(name: str, what: str, **options: Any) -> Argument:
    """An argument of a command, with further options of ``argparse``."""
    return name, {"type": str, "help": what, **options}


def flag(name: str, what: str) -> Argument:
    """An option without a value."""
    return name, {"action": "store_true", "help": what}


#: Options of several commands.
JSON = flag("--json", "Print JSON.")
TRACKING_URI = argument(
    "--tracking-uri", "The MLflow tracking address; by default MLFLOW_TRACKING_URI, or ./mlflow.db."
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

    The exit code is 0 for success, 1 if the command could not do what was asked, 2 for wrong
    arguments, missing packages and runs that cannot be read, and 130 for Ctrl-C.

    Args:
        args: The arguments after ``lightning-perf``; by default from the command line.
    """
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
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _remedy(error: ImportError, package: str) -> str:
    if isinstance(error, ModuleNotFoundError) and package:
        install = install_command(_INSTALLS.get(package, package))
        return f"the package {package} is missing. Try {install}."
    return f"a package cannot be imported ({error}). Try pip install --upgrade lightning_perf."


def _commands() -> dict[str, Command]:
    modules = {name: import_module(f"{__name__}.{module}") for name, module in _COMMANDS.items()}
    return {name: getattr(module, name) for name, module in modules.items()}


def _run(args: Sequence[str]) -> int:
    from jsonargparse import ArgumentParser, set_parsing_settings

    from lightning_perf import __version__

    if find_spec("shtab"):
        set_parsing_settings(add_print_completion_argument=True)
    parser = ArgumentParser(
        prog="lightning-perf",
        description="Training speed, as a share of what the hardware can do.",
        version=__version__,
        epilog="Exit codes: 0 success; 1 the command could not do it; 2 wrong arguments, a missing "
        "package, or a run that cannot be read; 130 Ctrl-C.",
    )
    subcommands = parser.add_subcommands()
    commands = _commands()
    for name, command in commands.items():
        description = " ".join((command.run.__doc__ or "").split())
        usage = "lightning-perf run [--config CONFIG] -- COMMAND" if name == "run" else None
        arguments = ArgumentParser(description=description, usage=usage)
        for names, options in command.arguments:
            arguments.add_argument(*names.split(), **options)
        summary = description.partition(". ")[0].rstrip(".")
        subcommands.add_subcommand(name, arguments, help=summary)
    # What follows two dashes is the command of `run`, whose options are not ours.
    end = args.index("--") if "--" in args else len(args)
    chosen = parser.parse_args([_dashed(each) for each in args[:end]])
    name = chosen.subcommand
    settings = chosen[name].as_dict()
    if end < len(args):
        if name != "run":
            parser.error(f"{name} takes no command after --")
        settings["command"] = args[end + 1 :]
    try:
        code: int = commands[name].run(**settings)
    except BrokenPipeError:
        raise
    except (Failure, LookupError, OSError) as error:
        why = str(error).rstrip(".")
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename}: {error.strerror}"
        say(f"lightning-perf {name}: {why}.", file=sys.stderr)
        code = error.code if isinstance(error, Failure) else 2
    return code


def _dashed(argument: str) -> str:
    """An option with dashes, however it is written."""
    name, equals, value = argument.partition("=")
    ours = name.startswith("--") and not name.startswith("--print_")  # jsonargparse's own
    return f"{name.replace('_', '-')}{equals}{value}" if ours else argument
