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
from inspect import Parameter, cleandoc, signature
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_perf.checks import install_command
from lightning_perf.errors import redacted
from lightning_perf.files import check_own, opened
from lightning_perf.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: The module of each command, imported when one runs since its dependencies may be missing.
_COMMANDS = {
    "capture": "runs", "compare": "runs", "devices": "machine", "doctor": "machine",
    "measure": "machine", "report": "runs", "run": "runs", "runs": "fleet", "stacks": "runs",
    "trace": "files", "try": "trials",
    "upload": "files", "watch": "runs",
}  # fmt: skip
#: The names to install of packages that are imported under another name.
_INSTALLS = {
    "jsonargparse": '"jsonargparse[signatures]"',
    "pynvml": "nvidia-ml-py",
    "pytorch_lightning": "lightning",
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow"),
}


#: An argument in a docstring: its name, the name of its value, and its text.
_ARGUMENT = re.compile(r"^    (\w+)(?: \((\S+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)
#: Bytes at the beginning of a file in which its mark is searched.
_HEAD = 1 << 10


class Failure(Exception):
    """Ends a command with a message, without a full stop, and an exit code."""

    def __init__(self, why: object, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


def print_json(content: object) -> None:
    """Print a value as JSON, for ``--json``."""
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
    args = sys.argv[1:] if args is None else args
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # closed, as with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):  # names may have characters that it cannot encode
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        try:
            code = _run(args)
        finally:  # --help and --version exit, too
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader, such as head, has ended
        # Nothing more is written, also when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = int(args[:1] == ["compare"])  # which must not pass so
    except (Failure, ImportError, LookupError, OSError) as error:
        why = redacted(_reason(error))  # it may name an address as the run
        command = " ".join(["lightning-perf", *args[:1]])
        say(f"{command}: {why}{'' if why.endswith('?') else '.'}", file=sys.stderr)
        code = error.code if isinstance(error, Failure) else 2
    sys.exit(code)


def _reason(error: Exception) -> str:
    """Why a command has failed, without a full stop."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        install = install_command(_INSTALLS.get(package, package))
        return f"the package {package} is missing. Try {install}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error).rstrip(".")


def all_commands() -> dict[str, Callable[..., int]]:
    """The function of each command."""
    modules = {name: import_module(f"{__name__}.{module}") for name, module in _COMMANDS.items()}
    # A keyword, such as "try", is no name of a function.
    return {
        name: getattr(module, f"{name}_" if iskeyword(name) else name)
        for name, module in modules.items()
    }


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
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="subcommand")
    commands = all_commands()
    for name, command in commands.items():
        _add(subcommands, name, command)
    if not args:
        parser.print_help(sys.stderr)
        return 2
    settings = vars(parser.parse_args(args))
    command = commands[settings.pop("subcommand")]
    return command(**settings)


class _Parser(ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. Try {self.prog} --help\n")


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
            spellings = (parameter.name.replace("_", "-"), parameter.name)
            names = [*dict.fromkeys(f"--{each}" for each in spellings)]
            names += ["-o"] if parameter.name == "output" else []
        elif default is not Parameter.empty:
            options["nargs"] = "?"
        if kind == list[str]:
            options["nargs"] = REMAINDER if name in ("run", "try") else "+"
        elif kind == list[str] | None:
            options["action"] = "append"
        elif kind in (int, float):
            options["type"] = kind
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["metavar"] = metavar or None
        if default is not Parameter.empty:
            options["default"] = default
        if default and isinstance(default, str):
            options["help"] += " (default: %(default)s)"
        parser.add_argument(*names, **options)
