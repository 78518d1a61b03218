"""Counts the instructions that the always-on set adds to a batch; fails if they grew by over 3 %.

    python benchmarks/instructions.py [--update]

Callgrind counts them (``apt install valgrind``; the marks need gcc), so the machine's load does not
matter. It counts the training thread's path of a batch: reports, sensors and collections, which
depend on clocks, are off. What we add is counted from a training with an idle profiler, which turns
off as many of Lightning's own events as the always-on set does: from a bare training the difference
may be negative. The expected counts are in ``instructions.json``, by version of Python, torch and
Lightning; ``--update`` writes those of this environment.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from math import inf
from pathlib import Path
from statistics import median

EXPECTED = Path(__file__).with_suffix(".json")
TOLERANCE = 1.03
#: Number of runs, of which the median counts: addresses vary, and with them dicts and caches.
TIMES = 5
#: Steps before the counted ones, which fill caches and count the shapes;
#: counted steps, without a multiple of the 50 batches after which `Flops` reports.
WARM, STEPS = 100, 40
NOTHING, IDLE = "nothing", "an idle profiler"
KINDS = (NOTHING, IDLE, "always on", "always on, declared FLOPs")
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def train(kind: str, marks: ctypes.CDLL) -> None:
    """Train, and mark the counted steps."""
    import lightning as L
    import torch
    from overhead import Tiny
    from shared import QUIET

    from lightning_perf import PyTorch, always_on

    class Batches:
        def __len__(self) -> int:
            return WARM + STEPS + 1

        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            batch = [torch.ones(8, 32), torch.ones(8, dtype=torch.long)]
            for step in range(len(self)):
                if step == WARM:
                    gc.collect()
                    marks.begin()
                if step == WARM + STEPS:
                    marks.end()
                yield batch

    model = Tiny()
    if kind.endswith("declared FLOPs"):
        model.flops_per_batch = 1_000_000
    kinds = {NOTHING: [], IDLE: [PyTorch(schedule="never")]}
    L.Trainer(
        **QUIET, max_epochs=1, logger=False, log_every_n_steps=10**6,
        default_root_dir=tempfile.mkdtemp(dir=Path.cwd()),
        callbacks=kinds[kind] if kind in kinds else [always_on(show_summary=False)],
    ).fit(model, Batches())  # fmt: skip


def child(library: str) -> None:
    """Run each kind; under callgrind."""
    from shared import quiet

    from lightning_perf.run import summary
    from lightning_perf.system import Sampler

    quiet()
    summary.REFRESH = inf
    Sampler.subscribe = lambda *_: None  # type: ignore[method-assign, assignment]
    gc.disable()
    marks = ctypes.CDLL(library)
    for kind in (NOTHING, *KINDS):  # the first one fills caches of the process
        train(kind, marks)
    os._exit(0)


def counted(folder: Path) -> dict[str, float]:
    """Instructions per step of each kind."""
    library = folder / "marks.so"
    compiler = ("gcc", "-O1", "-shared", "-fPIC", "-xc", "-", "-o", library)
    subprocess.run(compiler, input=MARKS, text=True, check=True)
    valgrind = ("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no",
                f"--callgrind-out-file={folder}/out")  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = (*valgrind, sys.executable, __file__, "--child", library)
    subprocess.run(command, cwd=folder, env=env, check=True)
    found = {}
    for number, kind in enumerate(KINDS, 2):
        text = (folder / f"out.{number}").read_text()
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
        assert total is not None, text[:300]
        found[kind] = int(total[1]) / STEPS
    return found


def main() -> int:
    """Count and compare; 1 if there are too many."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child)
    runs = []
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(counted(Path(folder)))
    found = {kind: median(run[kind] for run in runs) for kind in KINDS}
    added = {kind: round(median(run[kind] - run[IDLE] for run in runs)) for kind in KINDS[2:]}
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    here = f"python {platform.python_version()}"
    here += "".join(f", {package} {version(package)}" for package in ("torch", "lightning"))
    known = expected.get(here, {})
    print(f"{here}: {found[NOTHING]:,.0f} instructions per step without callbacks")
    print(f"{IDLE}: {found[IDLE] - found[NOTHING]:+,.0f}")
    for kind, count in added.items():
        expected_here = f"{known[kind]:+,}" if kind in known else "unknown"
        print(f"{kind}: {count:+,} beyond {IDLE}; expected: {expected_here}")
    if given.update:
        EXPECTED.write_text(json.dumps(expected | {here: added}, indent=1) + "\n")
        return 0
    grown = [kind for kind in known if added[kind] > TOLERANCE * known[kind]]
    print(f"grown by more than 3 %: {', '.join(grown) or 'none'}")
    return len(grown)


if __name__ == "__main__":
    sys.exit(main())
