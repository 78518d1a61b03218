"""The ``lightning-perf`` command, one module a subcommand."""

from __future__ import annotations

import sys

from lightning_perf.cli import capture, devices, measure, report, upload

_COMMANDS = {
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
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-perf",
        description="How fast a training runs against what the hardware can do.",
    )
    commands = parser.add_subcommands()
    for name, command in _COMMANDS.items():
        commands.add_subcommand(name, command.parser())
    chosen = parser.parse_args(args)
    sys.exit(_COMMANDS[chosen.subcommand].run(**chosen[chosen.subcommand].as_dict()))
