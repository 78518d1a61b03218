"""The command ``lightning-perf``, one module per subcommand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

#: The names to install of packages that are imported under another name.
_INSTALLS = {
    "jsonargparse": '"jsonargparse[signatures]"',
    "pynvml": "nvidia-ml-py",
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow"),
}


def _commands() -> dict[str, ModuleType]:
    # Imported here, since their dependencies may be missing.
    from lightning_perf.cli import capture, devices, measure, report, upload

    return {
        "capture": capture,
        "devices": devices,
        "measure": measure,
        "report": report,
        "upload": upload,
    }


def main(args: list[str] | None = None) -> None:
    """Run the command.

    Args:
        args: The arguments after ``lightning-perf``; by default from the command line.
    """
    try:
        sys.exit(_run(args))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "lightning_perf":
            raise
        print(f"lightning-perf: {_remedy(error, package)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


def _remedy(error: ImportError, package: str) -> str:
    if isinstance(error, ModuleNotFoundError) and package:
        install = _INSTALLS.get(package, package)
        return f"the package {package} is missing. Try pip install {install}."
    return f"a package cannot be imported ({error}). Try pip install --upgrade lightning_perf."


def _run(args: list[str] | None) -> int:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-perf",
        description="Training speed, as a share of what the hardware can do.",
    )
    subcommands, commands = parser.add_subcommands(), _commands()
    for name, command in commands.items():
        arguments = command.parser()
        summary = arguments.description.partition(". ")[0].rstrip(".")
        subcommands.add_subcommand(name, arguments, help=summary)
    chosen = parser.parse_args(args)
    code: int = commands[chosen.subcommand].run(**chosen[chosen.subcommand].as_dict())
    return code
