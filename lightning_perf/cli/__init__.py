"""The command ``lightning-perf``, one module per subcommand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

#: What installs a package, where that is not its own name.
_INSTALLS = {
    "jsonargparse": '"jsonargparse[signatures]"',
    "pynvml": "nvidia-ml-py",
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow"),
}


def _commands() -> dict[str, ModuleType]:
    # Within: what they import may be missing.
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
        args: What follows ``lightning-perf``; by default the command line.
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
    return f"a package does not import ({error}). Try pip install --upgrade lightning_perf."


def _run(args: list[str] | None) -> int:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-perf",
        description="How fast a training runs against what the hardware can do.",
    )
    subcommands, commands = parser.add_subcommands(), _commands()
    for name, command in commands.items():
        subcommands.add_subcommand(name, command.parser())
    chosen = parser.parse_args(args)
    code: int = commands[chosen.subcommand].run(**chosen[chosen.subcommand].as_dict())
    return code
