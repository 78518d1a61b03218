"""Run a training with the always-on callbacks in each Trainer of Lightning.

Write the training's command after two dashes: lightning-perf run -- python train.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from lightning_perf.cli import Failure, argument

if TYPE_CHECKING:
    from collections.abc import Sequence

ARGUMENTS = {
    "--config": argument(
        "A YAML file with the callbacks to use instead, such as configs/always_on.yaml."
    ),
}


def run(config: str | None, command: Sequence[str] = ()) -> int:
    """Replace this process by the command, which gets its signals and gives its exit code.

    If it cannot be run, the exit code is 2, or 127 if it is not found.
    """
    if not command:
        raise Failure("there is no command. Try lightning-perf run -- python train.py")
    if config is not None and not Path(config).is_file():
        raise Failure(f"there is no file {config}")
    if which(command[0]) is None:
        raise Failure(f"{command[0]} is not a program", 127)  # as in a shell
    os.environ["LIGHTNING_PERF"] = "1" if config is None else str(Path(config).resolve())
    return os.execvp(command[0], list(command))  # noqa: S606  no shell
