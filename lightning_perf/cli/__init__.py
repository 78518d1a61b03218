"""The command ``lightning-perf``: a function per subcommand."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
import zlib
from argparse import REMAINDER, ArgumentParser
from contextlib import suppress
from errno import EEXIST
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, cleandoc, signature
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_perf.checks import install_command
from lightning_perf.errors import PerfWarning, did_you_mean, redacted
from lightning_perf.files import check_own, opened
from lightning_perf.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: The module of each command, imported when one runs since its dependencies may be missing.
_COMMANDS = {
    "capture": "runs", "compare": "runs", "devices": "machine", "doctor": "machine",
    "measure": "machine", "report": "runs", "run": "runs", "trace": "files", "upload": "files",
    "watch": "runs",
}  # fmt: skip
#: The names to install of packages that are imported under another name.
_INSTALLS = {
    "jsonargparse": '"jsonargparse[signatures]"',
    "pynvml": "nvidia-ml-py",
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow"),
}


#: An argument in a docstring: its name, the name of its value, and its text.
_ARGUMENT = re.compile(r"^    (\w+)(?: \((\S+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)
#: Bytes at the beginning of a file that tell what it is.
_HEAD = 1 << 10
#: Second names of options.
_SHORT = {"output": ("-o",)}
_formatwarning = warnings.formatwarning


class Failure(Exception):
    """Ends a command with a message, without a full stop, and an exit code."""

    def __init__(self, why: object, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


def print_json(content: object) -> None:
    """Print what ``--json`` asks for."""
    say(json.dumps(content, indent=1))


def check_output(path: Path, mark: bytes) -> None:
    """Raise `OSError` if a command would replace something else than its own file.

    The user may have named a recording. The command's files have ``mark`` near their beginning.
    """
    check_own(path)
    with suppress(FileNotFoundError, zlib.error), opened(path) as file:
        head = file.read(_HEAD)
        if head.startswith(b"\x1f\x8b"):
            head = zlib.decompressobj(31).decompress(head, _HEAD)
        if head and mark not in head:
            raise FileExistsError(EEXIST, "Another file is there: name a new one", str(path))


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


def all_commands() -> dict[str, Callable[..., int]]:
    """The function of each command."""
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
    commands = all_commands()
    for name, command in commands.items():
        _add(subcommands, name, command)
    if not args:
        parser.print_help(sys.stderr)
        return 2
    if args[0] != "run":  # whose arguments are those of another command
        args = [_dashed(each) for each in args]
    chosen, unknown = parser.parse_known_args(args)
    settings = vars(chosen)
    name = settings.pop("subcommand")
    settings.pop("print_completion", None)
    if unknown:
        subcommands.choices[name].error(f"there is no option {unknown[0]}")
    try:
        code = commands[name](**settings)
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


def _add(subcommands: Any, name: str, command: Callable[..., int]) -> None:
    """Add a subcommand to the parser, with the texts of its docstring.

    Parameters are arguments, and those by keyword alone are options. ``name (METAVAR): text`` also
    names the value.
    """
    about, _, arguments = cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    description = " ".join(about.split())
    summary = description.partition(". ")[0].rstrip(".")
    parser = subcommands.add_parser(name, help=summary, description=description)
    texts = {argument: texts for argument, *texts in _ARGUMENT.findall(arguments)}
    for parameter in signature(command, eval_str=True).parameters.values():
        kind, default = parameter.annotation, parameter.default
        # Without docstrings, as with python -OO, there are no texts.
        metavar, text = texts.get(parameter.name, ("", ""))
        names = [parameter.name]
        options: dict[str, Any] = {"help": " ".join(text.split()).replace("%", "%%")}
        if parameter.kind is Parameter.KEYWORD_ONLY:
            names = [f"--{parameter.name.replace('_', '-')}", *_SHORT.get(parameter.name, ())]
        elif default is not Parameter.empty:
            options["nargs"] = "?"
        if kind == list[str]:
            options["nargs"] = REMAINDER if name == "run" else "*"
        elif kind == list[str] | None:
            options["action"] = "append"
        elif kind is int:
            options["type"] = int
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["metavar"] = metavar or None
        if default is not Parameter.empty:
            options["default"] = default
        if default and isinstance(default, str):
            options["help"] += " (default: %(default)s)"
        parser.add_argument(*names, **options)


def _dashed(argument: str) -> str:
    """An option with dashes, however it is written."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def _discard_output() -> None:
    """Write nothing more, also when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
