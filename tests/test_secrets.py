"""No file or output of a run contains a secret of the process."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.browser import needs_browser, text_from_browser
from helpers.pages import loaded_from_elsewhere
from helpers.small import Records, Small, trainer

from lightning_perf import Fixed, Memray, PyTorch, VizTracer, always_on
from lightning_perf.charts import FlameGraph, Heading, Table, fold, page

SECRET = "hunter2-correct-horse"


class Private(Small):
    """Has a secret in its hyperparameters and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = SECRET
        self.save_hyperparameters({"api_key": SECRET})


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run with every recorder, started with secrets and a strict umask."""
    folder = tmp_path_factory.mktemp("private")
    ours = [
        always_on(show_summary=False),
        PyTorch(schedule=Fixed(2, 1), with_stack=True, record_shapes=True),
        VizTracer(schedule=Fixed(5, 1)),
        Memray(schedule=Fixed(8, 1), flamegraph=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_TOKEN", SECRET)
        patch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
        patch.setattr(sys, "argv", ["train.py", "--api-key", SECRET])
        before = os.umask(0o027)
        try:
            trainer(folder, *ours, logger=Records()).fit(Private())
        finally:
            os.umask(before)
    return folder


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


@pytest.mark.slow
def test_no_secret_of_the_process_is_in_a_file(left: Path) -> None:
    """Secrets are in the environment, the command line and the hyperparameters."""
    files = [path for path in left.rglob("*") if path.is_file()]
    assert {".gz", ".bin", ".html", ".json", ".txt"} <= {path.suffix for path in files}
    assert [str(path) for path in files if SECRET.encode() in content(path)] == []


@pytest.mark.slow
def test_the_run_information_in_a_trace_is_an_allow_list(left: Path) -> None:
    """A trace has no other information on the machine and the process."""
    (path,) = left.rglob("*.pt.trace.json.gz")
    trace = json.loads(content(path))
    ours = {"rank", "local_rank", "node_rank", "world_size", "run_name", "stage", "epoch", "batch",
            "step"}  # fmt: skip
    torchs = {
        "schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "traceName",
        "baseTimeNanoseconds", "traceEvents", "record_shapes", "profile_memory", "with_stack",
        "with_flops", "with_modules", "trace_id", "host_name", "cupti_version",
    }  # fmt: skip
    assert set(trace) <= ours | torchs, set(trace) - ours - torchs


@pytest.mark.slow
def test_files_and_folders_have_the_modes_of_the_users_umask(left: Path) -> None:
    """Others can read exactly what the umask allows."""
    below = [path for path in left.rglob("*") if not path.is_symlink()]
    modes = {str(p.relative_to(left)): oct(p.stat().st_mode & 0o777) for p in below}
    wrong = {
        name: mode for name, mode in modes.items()
        if mode != ("0o750" if (left / name).is_dir() else "0o640")
    }  # fmt: skip
    assert wrong == {}


HOSTILE = "<img src=x onerror=alert(1)></title><script>alert(1)</script>\"'"


def test_pages_escape_what_comes_from_users() -> None:
    """Names in headings, tables and flame graphs are text."""
    graph = FlameGraph(fold([([HOSTILE], 3)]), HOSTILE)
    text = page(HOSTILE, [HOSTILE, Heading(HOSTILE), Table([HOSTILE], [[HOSTILE]]), graph])
    assert text.count("<script>") == 1
    assert "<img" not in text
    assert "<script>alert" not in graph.svg(alone=True)
    assert loaded_from_elsewhere(text) == []


@pytest.mark.slow
@needs_browser
def test_a_page_runs_only_its_own_script_and_loads_nothing(tmp_path: Path) -> None:
    """Chromium blocks injected scripts, images and requests."""
    inner = page("A page", [FlameGraph(fold([(["a", "b"], 3), (["c"], 5)]), "Frames")])
    assert re.search(r"Content-Security-Policy[^>]*default-src 'none'", inner)
    source = json.dumps(inner).replace("</", "<\\/")
    outer = """<iframe id="page"></iframe><script>
    const frame = document.querySelector("#page"), blocked = [];
    let ran = "no", own = "";
    window.run = () => { ran = "yes"; };
    frame.onload = () => {
      const inside = frame.contentDocument, graph = [...inside.querySelectorAll("svg.flame svg")];
      graph[1].dispatchEvent(new MouseEvent("click"));
      own = graph[1].getAttribute("width") == "100%" ? "zoomed" : "not zoomed";
      inside.addEventListener("securitypolicyviolation", event => {
        if (blocked.push(event.effectiveDirective) < 3) return;
        fetch("/", {method: "POST", body: [own, ran, ...blocked.sort()].join(" ")});
      });
      const script = inside.createElement("script"), image = inside.createElement("img");
      script.textContent = "parent.run()";
      image.src = "/leak";
      inside.body.append(script, image);
      frame.contentWindow.fetch("/leak").catch(() => 0);
    };
    frame.srcdoc = SOURCE;
    </script>"""
    said = text_from_browser(outer.replace("SOURCE", source), tmp_path)
    assert said == "zoomed no connect-src img-src script-src-elem"
