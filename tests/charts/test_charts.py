"""The stacked chart of times, checked in the written files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.browser import needs_browser, text_from_browser, without_policy

from lightning_perf.charts import COLOURS, page
from lightning_perf.timing.totals import Share
from lightning_perf.tracking.page import Row, costs, stack

#: Batches of up to 50 ms.
ROWS: list[Row] = [
    (step, {"forward": 0.01, "backward": 0.02, "dataloader_next": 0.01 * step / 100})
    for step in range(10, 201, 10)
]
TABLE = [
    Share("Small.on_train_batch_end", 1.5, 300, 0.02),
    Share("CSVLogger.log_metrics", 12.25, 49, 0.16),
]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


class Page(HTMLParser):
    """The tags, attributes, texts and tooltips of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    @property
    def data(self) -> dict[str, Any]:
        (data,) = (each["data-chart"] for _, each in self.tags if "data-chart" in each)
        assert data
        return json.loads(data)


def page_of(folder: Path, rows: Sequence[Row], table: Sequence[Share] = (), first: int = 0) -> Page:
    parts = [stack(rows, first), *([costs(table)] if table else [])]
    (folder / "time.html").write_text(page("Where the time went", parts), encoding="utf-8")
    return Page(folder / "time.html")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """It works offline and in MLflow's sandboxed frame."""
    page = page_of(tmp_path, ROWS, table=TABLE)
    for word in ("http:", "https:", "//cdn", "@import", "url(http", "fetch(", "XMLHttp", "import("):
        assert word not in page.source
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "href", "xlink:href"} & set(attributes)


def test_the_page_shows_the_values(tmp_path: Path) -> None:
    """Tooltips have steps and values, the legend means and shares, the largest first."""
    page = page_of(tmp_path, ROWS, first=1)
    assert page.data["windows"][:2] == ["steps 1 to 10", "steps 11 to 20"]
    assert len(page.data["windows"]) == len(ROWS)
    assert page.data["unit"] == "ms"
    names = [text for text in page.texts if text in ROWS[0][1]]
    assert names == ["backward", "dataloader_next", "forward"]
    assert page.data["values"][0] == [20.0] * len(ROWS)
    assert page.data["values"][1] == [pytest.approx(step / 10) for step, _ in ROWS]
    assert {"20.0 ms", "10.5 ms", "49.4%", "25.9%"} <= set(page.texts)
    assert "40.5 ms per batch on average, steps 1 to 200" in page.texts
    fills = [attributes["fill"] for _, attributes in page.tags if attributes.get("class") == "band"]
    assert fills == [COLOURS[name] for name in names]


def test_the_table_of_callbacks_is_ordered_by_cost(tmp_path: Path) -> None:
    """Its columns are name, seconds, calls, time per call and share."""
    page = page_of(tmp_path, ROWS, table=[*TABLE, Share("Idle.log", 0.0, 0, 0.0)])
    cells = page.texts[page.texts.index("share of the run") + 1 :][:-1]
    assert cells == [
        *("CSVLogger.log_metrics", "12.2", "49", "250 ms", "16.0%"),
        *("Small.on_train_batch_end", "1.50", "300", "5.00 ms", "2.0%"),
        *("Idle.log", "0", "0", "0.0%"),
    ]


def test_names_are_escaped(tmp_path: Path) -> None:
    """Callbacks may have any name."""
    evil = "</script><img src=x onerror=alert(1)>"
    page = page_of(tmp_path, ROWS, table=[Share(evil, 1.0, 1, 1.0)])
    assert "img" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 1


@pytest.mark.parametrize(
    ("rows", "summary"),
    [
        ([], "No batch was timed."),
        ([(5, {}), (6, {"forward": 0.0})], "No batch was timed."),
        ([(5, {"forward": 2.5})], "2.50 s per batch on average, steps 0 to 5"),
        (
            [(5, {"forward": 1e-5}), (5, {"forward": 3e-5})],
            "20.0 µs per batch on average, steps 0 to 5",
        ),
        ([(n, {"forward": 0.5}) for n in range(1300)], "500 ms per batch on average, steps "),
    ],
    ids=["none", "nothing", "one", "twice the same", "1300"],
)
def test_any_number_of_rows_can_be_drawn(tmp_path: Path, rows: list[Row], summary: str) -> None:
    """From no row to more rows than points, the page has a summary."""
    page = page_of(tmp_path, rows)
    assert any(text.startswith(summary) for text in page.texts)
    assert "NaN" not in page.source
    assert "Infinity" not in page.source


def area(path: str) -> float:
    """The area within a path of straight lines."""
    points = [tuple(map(float, point.split(","))) for point in path.strip("MZ").split()]
    return abs(sum(a * d - b * c for (a, b), (c, d) in pairwise([*points, points[0]]))) / 2


def test_a_value_is_constant_within_its_window(tmp_path: Path) -> None:
    """The area of validation is its time."""
    lasts = (4, 9, 14, 19, 24, 29, 44, 47)
    rows: list[Row] = [(n, {"forward": 1.0, "validation": 6.0 * (n == 24)}) for n in lasts]
    shown = stack(rows)
    assert list(shown.edges) == [-0.5, *(n + 0.5 for n in lasts)]
    assert list(shown.layers[1].values) == pytest.approx([6.0 * (n == 24) for n in lasts])
    assert shown.windows[:2] == ["steps 0 to 4", "steps 5 to 9"]
    page = page_of(tmp_path, rows)
    assert "1.62 s per batch on average, steps 0 to 47" in page.texts  # 48 s, and 5 batches of 6 s
    forward, validation = (
        area(str(each["d"])) for _, each in page.tags if each.get("class") == "band"
    )
    assert validation / forward == pytest.approx(30 / 48, rel=0.01)
    assert [band.share for band in shown.layers] == pytest.approx([48 / 78, 30 / 78])


def test_a_resumed_run_begins_at_its_first_step() -> None:
    """The first window starts at the first step of the run, not at 0."""
    shown = stack([(109, {"forward": 1.0}), (119, {"forward": 2.0})], first=105)
    assert shown.windows == ["steps 105 to 109", "steps 110 to 119"]
    assert shown.layers[0].amount == pytest.approx(25 / 15)


def test_a_category_is_zero_before_it_first_appears() -> None:
    """Validation appears at the step where it first runs."""
    rows: list[Row] = [(1, {"forward": 1.0}), (2, {"forward": 1.0, "validation": 3.0})]
    shown = stack(rows, first=1)
    assert [(band.name, list(band.values)) for band in shown.layers] == [
        ("validation", [0.0, 3.0]),
        ("forward", [1.0, 1.0]),
    ]


def test_small_categories_are_folded_into_other() -> None:
    """Categories below half a percent join "other", whose name says so; the total is unchanged."""
    row = {"forward": 0.99, "to_device": 0.004, "logging": 0.003, "other": 0.003}
    bands = {band.name: band.share for band in stack([(1, row)]).layers}
    joined = "other, and categories below 0.5 %"
    assert bands == {"forward": pytest.approx(0.99), joined: pytest.approx(0.01)}


def test_a_high_peak_is_cut_off(tmp_path: Path) -> None:
    """The first batch compiles for a minute: a note has its value."""
    rows: list[Row] = [(n, {"forward": 60.0 if n == 0 else 0.1}) for n in range(100)]
    shown = stack(rows)
    assert shown.top == pytest.approx(0.15)
    note = "One peak is cut off (up to 60.0 s, at step 0)."
    assert any(text.endswith(note) for text in page_of(tmp_path, rows).texts)
    assert stack([(n, {"forward": 1.0 + n}) for n in range(100)]).summary.endswith("steps 0 to 99")


def test_drawing_libraries_are_imported_on_demand() -> None:
    """Importing the package does not import jinja2; a page needs neither torch nor matplotlib."""
    code = """
import sys
from lightning_perf.charts import page
from lightning_perf.tracking.page import stack
assert not {"jinja2", "torch"} & set(sys.modules)
page("time", [stack([(1, {"forward": 1.0})])])
assert not {"matplotlib", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


#: Simulation of colour blindness (Machado et al. 2009, in linear RGB).
SIGHTS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def seen(colour: str, sight: str) -> np.ndarray:
    """A colour in CIE L*a*b*, as seen with a kind of colour blindness."""
    value = np.array(rgb(colour)) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1)
    xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
         [0.0193339, 0.1191920, 0.9503041]]
    ) @ linear / [0.95047, 1, 1.08883]  # fmt: skip
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_are_distinguishable(sight: str) -> None:
    """Any two categories differ clearly, and each from a light and a dark page."""
    for one, other in combinations(COLOURS.values(), 2):
        assert np.linalg.norm(seen(one, sight) - seen(other, sight)) >= 20, (one, other)
    for colour in COLOURS.values():
        for paper in ("#ffffff", "#15191f"):
            assert np.linalg.norm(seen(colour, sight) - seen(paper, sight)) >= 15, colour


@pytest.mark.slow
@needs_browser
def test_the_tooltip_works_in_a_sandboxed_frame(tmp_path: Path) -> None:
    """It shows the values of the step below the pointer."""
    page = without_policy(page_of(tmp_path, ROWS, table=TABLE).source)
    point = """<script>
    const canvas = document.querySelector(".canvas"), tip = document.querySelector(".tip");
    function point() {
      const box = canvas.getBoundingClientRect();
      if (box.width < 500) return setTimeout(point, 20);  // not laid out yet
      canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 20, clientY: 99}));
      parent.postMessage(tip.hidden ? "hidden" : tip.innerText, "*");
    }
    point();
    </script></body>"""
    outer = f"""<script>
    onmessage = event => fetch("/", {{method: "POST", body: event.data}});
    </script><iframe width="1200" height="800" sandbox="allow-scripts"
    srcdoc="{escape(page.replace("</body>", point))}"></iframe>"""
    said = text_from_browser(outer, tmp_path).split()
    assert said[:6] == ["steps", "191", "to", "200", "50.0", "ms"]
    assert {"backward", "20.0", "40.0%", "dataloader_next", "forward", "10.0", "20.0%"} <= set(said)
