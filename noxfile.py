"""The chores of this project: ``nox -l`` lists them, ``nox -s demo`` shows what it does."""

from __future__ import annotations

import nox

PYPROJECT = nox.project.load_toml("pyproject.toml")
# Pins torch to a build that pip takes without several GB of CUDA.
CONSTRAINTS = ("-c", "tests/constraints.txt")
# Compiling all of torch takes a minute; of most modules, nothing is needed.
QUICKLY = ("--no-compile",)

nox.needs_version = ">=2024.10.9"
# uv does not look where a machine keeps a CPU build of torch.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "types"]


def _install(session: nox.Session, *groups: str, options: tuple[str, ...] = ()) -> None:
    wanted = (".", *nox.project.dependency_groups(PYPROJECT, *groups))
    session.install(*CONSTRAINTS, *options, *wanted)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT, show its MFU and traces, and say how to open the MLflow UI."""
    _install(session, options=QUICKLY)
    train = ("examples/train_gpt.py", "fit", "--config", "configs/demo.yaml")
    # Threads that wait by spinning make a busy machine many times slower.
    session.run("python", *train, *session.posargs, env={"OMP_WAIT_POLICY": "PASSIVE"})
    session.run("lightning-perf", "report")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests against the built wheel (what they cover: ``-- -n 2 --cov``)."""
    _install(session, "tests")
    env = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    options = session.posargs or ("-n", "2")
    session.run("pytest", *options, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types with mypy, strictly."""
    _install(session, "types", options=QUICKLY)
    session.run("mypy")
