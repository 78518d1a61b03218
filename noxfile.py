"""Development tasks: ``nox -l`` lists them, ``nox -s demo`` shows what the package does."""

from __future__ import annotations

import os
import shutil
from itertools import chain
from pathlib import Path

import nox
from packaging.requirements import Requirement

PYPROJECT = nox.project.load_toml("pyproject.toml")
# Pins torch to a build that pip installs without several GB of CUDA.
CONSTRAINTS = ("-c", "tests/constraints.txt")
LOCK = "tests/lock.txt"
# Compiling all of torch takes a minute, and most modules are not needed.
QUICKLY = ("--no-compile",)
UPGRADE = ("--upgrade", "--upgrade-strategy", "eager")
TEST_ENV = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/*_*.yml",
    "citation-file-format": "CITATION.cff",
}
PYTHONS = nox.project.python_versions(PYPROJECT)

nox.needs_version = ">=2024.10.9"
# uv does not look where a machine keeps a CPU build of torch.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "types"]


def _install(session: nox.Session, *groups: str, options: tuple[str, ...] = ()) -> None:
    wanted = (".[all]", *nox.project.dependency_groups(PYPROJECT, *groups))
    session.install(*CONSTRAINTS, *options, *wanted)


def _run_tests(session: nox.Session, *options: str, select: tuple[str, ...] = ()) -> None:
    """Run the tests against the built wheel."""
    _install(session, "tests", options=options)
    session.run("pytest", *select, *(session.posargs or ("-n", "2")), env=TEST_ENV)


def _lowest(requirements: list[str]) -> list[str]:
    """Constraints that hold all requirements but torch at their lower bounds."""
    parsed = map(Requirement, requirements)
    bounds = [(package.name, spec) for package in parsed for spec in package.specifier]
    return [
        f"{name}=={spec.version}"
        for name, spec in bounds
        # PyPI has an older torch for CUDA only.
        if spec.operator == ">=" and name != "torch"
    ]


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT, show its MFU and traces, and say how to open the MLflow UI."""
    _install(session, options=QUICKLY)
    train = ("examples/train_gpt.py", "fit", "--config", "configs/demo.yaml")
    # Threads that wait by spinning make a busy machine many times slower.
    session.run("python", *train, *session.posargs, env={"OMP_WAIT_POLICY": "PASSIVE"})
    session.run("lightning-perf", "report")
    # The caller's shell does not find it: the environment is nox's.
    session.log(f"mlflow is {Path(session.bin, 'mlflow').resolve()}")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests against the built wheel, with locked versions (coverage: ``-- -n 2 --cov``)."""
    _run_tests(session, "-c", LOCK)


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """Run the fast tests, and some cases of each slow one that tests/promises.md names."""
    _run_tests(session, "-c", LOCK, select=("-m", "quick"))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and the files in .github by their schemas."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    for schema, pattern in SCHEMAS.items():
        files = sorted(map(str, Path().glob(pattern)))
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types with mypy, strictly."""
    _install(session, "types", options=QUICKLY)
    session.run("mypy")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation as a site in site/, strictly (``-- serve`` to look at it)."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "docs"))
    build = session.posargs or ("build", "--strict")
    session.run("mkdocs", *build, env={"NO_MKDOCS_2_WARNING": "1"})


# Before a release.


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in the locked versions; needs PyPI's own index."""
    session.install("pip-audit")
    session.run("pip-audit", "--no-deps", "--requirement", LOCK)


#: What old releases of Lightning and MLflow need, and let pip install otherwise.
OLD = ["setuptools<81", "sqlalchemy<2.1"]


@nox.session(python=PYTHONS[0], default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml allows, on the oldest Python."""
    lowest = Path(session.create_tmp(), "minimums.txt")
    project = PYPROJECT["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    lowest.write_text("\n".join([*_lowest([*project["dependencies"], *extras]), *OLD]))
    _run_tests(session, "-c", str(lowest))


@nox.session(default=False)
def oldest_lightning(session: nox.Session) -> None:
    """Run the tests with the oldest Lightning, and the newest releases of all else."""
    lowest = Path(session.create_tmp(), "lightning.txt")
    bounds = _lowest(PYPROJECT["project"]["dependencies"])
    lowest.write_text("\n".join([each for each in bounds if each.startswith("lightning")] + OLD))
    _run_tests(session, "-c", str(lowest), *UPGRADE)


@nox.session(default=False)
def master(session: nox.Session) -> None:
    """Run the tests with a checkout of Lightning, such as its master, in LIGHTNING_SOURCE."""
    source = Path(os.environ["LIGHTNING_SOURCE"]).resolve()
    _install(session, "tests", options=QUICKLY)
    # Its LightningCLI asks for jsonnet, too. The source is laid over the release: building it
    # needs files of its repository that a snapshot may not have.
    session.install(*CONSTRAINTS, *QUICKLY, "jsonargparse[jsonnet,signatures]")
    env = TEST_ENV | {"PYTHONPATH": str(source / "src")}
    session.run("pytest", *(session.posargs or ("-n", "2")), env=env)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Run the tests with the newest releases (of torch, PyPI has newer ones for CUDA only)."""
    _run_tests(session, *UPGRADE)


# A separate name, because `tests` must run on a machine with one Python.
for _python in PYTHONS:
    nox.session(_run_tests, name=f"tests-{_python}", python=_python, default=False)


def _check(session: nox.Session, script: str, *groups: str) -> None:
    _install(session, "tests", *groups, options=QUICKLY)
    session.run("python", f"benchmarks/{script}.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def unchanged(session: nox.Session) -> None:
    """Compare trainings of every kind with and without each callback, bit by bit."""
    _check(session, "unchanged")


@nox.session(default=False)
def chaos(session: nox.Session) -> None:
    """Train with random faults (``-- --runs 200 --seed 0``) and compare with the run without us."""
    _check(session, "chaos")


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Fuzz all that reads text or files of others (``-- --seconds 60 --only trace``); on Linux."""
    _check(session, "fuzz", "fuzz")


@nox.session(default=False)
def instructions(session: nox.Session) -> None:
    """Count the instructions that we add to a batch; fail if they grew by more than 3 %."""
    _check(session, "instructions")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure our overhead and that of peers on an idle machine (``-- --turns 60``)."""
    _check(session, "overhead")
    for script in ("profilers", "ends"):
        session.run("python", f"benchmarks/{script}.py", env=TEST_ENV)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Train long with all callbacks (``-- --steps 1000000``): no resource use may grow."""
    _check(session, "soak")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist, check them, and use the installed wheel."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "build"))
    folder = Path(session.create_tmp(), "dist")
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(folder))
    files = sorted(map(str, folder.iterdir()))
    session.run("twine", "check", "--strict", *files)
    wheel = next(file for file in files if file.endswith(".whl"))
    session.install(*CONSTRAINTS, *QUICKLY, "--force-reinstall", "--no-deps", wheel)
    session.install(*CONSTRAINTS, *QUICKLY, wheel, "pytest")
    session.run("pytest", "tests/release/test_wheel.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def ui(session: nox.Session) -> None:
    """Look at a run in MLflow's UI and at its pages with Chromium; renews docs/images."""
    _install(session, "tests", "ui", options=QUICKLY)
    # Selenium's trio warns when Hypothesis is imported, which its plugin does after the tests.
    plugin = ("-p", "no:hypothesispytest")
    session.run("pytest", *plugin, "tests/release/test_ui.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def skinny(session: nox.Session) -> None:
    """Log to a server of MLflow with mlflow-skinny, without MLflow."""
    server = Path(session.create_tmp(), "server").resolve()
    if not server.exists():
        session.run("python", "-m", "venv", str(server))
        session.run(f"{server}/bin/python", "-m", "pip", "install", "mlflow>=3.14", external=True)
    session.install(*CONSTRAINTS, *QUICKLY, ".", "mlflow-skinny>=3.14", "pytest")
    env = {**TEST_ENV, "MLFLOW_SERVER_PYTHON": f"{server}/bin/python"}
    session.run("pytest", "tests/release/test_skinny.py", *session.posargs, env=env)


@nox.session(default=False)
def loggers(session: nox.Session) -> None:
    """Log to Comet, Neptune, TensorBoard, W&B, CSV and MLflow, offline and at once."""
    _install(session, "tests", "loggers", options=QUICKLY)
    session.run("pytest", "tests/release/test_loggers.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def ecosystem(session: nox.Session) -> None:
    """Train with other packages, with and without us: same weights and FLOPs (``-- -k darts``)."""
    _install(session, "tests", "ecosystem", options=UPGRADE)
    session.run("pytest", "tests/ecosystem", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def lightning_suite(session: nox.Session) -> None:
    """Run Lightning's own tests with our callbacks in every Trainer (``-- trainer callbacks``).

    LIGHTNING_SOURCE names a checkout of Lightning, of the release that is to be installed.
    """
    source = Path(os.environ["LIGHTNING_SOURCE"]).resolve()
    release = (source / "src/version.info").read_text().strip()
    _install(session, "tests", "lightning-suite", options=(f"lightning=={release}", *QUICKLY))
    script = ("tests/ecosystem/lightning_suite.py", str(source))
    session.run("python", *script, *session.posargs, env=TEST_ENV)
