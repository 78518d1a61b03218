"""Flame graphs: widths are shares; the SVG is valid, escaped and deterministic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.browser import needs_browser, text_from_browser, without_policy

from lightning_perf.charts import FlameGraph, fold, page, read_folded
from lightning_perf.units import bytes_text

SVG = "{http://www.w3.org/2000/svg}"
STACKS = """main;load;read 60
main;train 30
main;load;decode 10
"""


def boxes(picture: str) -> dict[str, dict[str, float]]:
    """Position and width of each frame, by its name."""
    return {
        frame.findtext(f"{SVG}text", ""): {
            key: float(frame.get(key, "").rstrip("%")) for key in ("x", "y", "width")
        }
        for frame in ElementTree.fromstring(picture).iterfind(f"{SVG}svg")
    }


def draw(text: str) -> str:
    return FlameGraph(fold(read_folded(text)), "A title").svg(alone=True)


def test_widths_are_proportional() -> None:
    """A frame is as wide as its share, below its caller, the widest sibling first."""
    found = boxes(draw(STACKS))
    assert {name: box["width"] for name, box in found.items()} == pytest.approx(
        {"all": 100, "main": 100, "load": 70, "read": 60, "decode": 10, "train": 30}
    )
    assert {name: box["x"] for name, box in found.items()} == pytest.approx(
        {"all": 0, "main": 0, "load": 0, "read": 0, "decode": 60, "train": 70}
    )
    depths = [found[name]["y"] for name in ("all", "main", "load", "read")]
    assert depths == sorted(depths)
    assert found["decode"]["y"] == found["read"]["y"]


def test_the_order_of_stacks_does_not_matter() -> None:
    """The same stacks give the same text in any order."""
    assert draw(STACKS) == draw("\n".join(reversed(STACKS.splitlines())))


def test_tooltips_show_value_and_share() -> None:
    """The tooltip of a frame shows its value with the unit, and its share."""
    root = fold([(["a"], 3 << 20), (["b"], 1 << 20)])
    picture = FlameGraph(root, "Memory", bytes_text).svg(alone=True)
    assert "<title>a (3.0 MiB, 75.0%)</title>" in picture
    assert "Memory: 4.0 MiB" in picture


def test_names_are_escaped() -> None:
    """A name never becomes markup or script."""
    evil = """<script>alert("1")</script>&'"""
    picture = FlameGraph(fold([([evil], 1)]), evil).svg(alone=True)
    assert evil in boxes(picture)
    assert picture.count("<script>") == 1


def test_invisible_frames_are_left_out() -> None:
    """The size of a picture is bounded for any number of functions."""
    stacks = [([f"f{n}"], 1) for n in range(50_000)] + [(["g"], 50_000)]
    assert set(boxes(FlameGraph(fold(stacks), "t").svg(alone=True))) == {"all", "g"}


def test_an_empty_recording_shows_the_root() -> None:
    """Without stacks only the root is drawn."""
    assert set(boxes(draw(""))) == {"all"}


def test_nothing_is_loaded() -> None:
    """The only address is the XML namespace."""
    assert set(re.findall(r"https?://[^\"]+", draw(STACKS))) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
@needs_browser
def test_a_page_of_flame_graphs_in_a_browser(tmp_path: Path) -> None:
    """A click enlarges a frame to the full width, a search dims others, a narrow window fits."""
    ask = """<script>
    const all = {}, frames = [...document.querySelectorAll("svg.flame svg")];
    const name = frame => frame.querySelector("text").textContent;
    const look = () => frames.filter(frame => frame.style.display != "none").map(frame => {
      const box = frame.querySelector("rect").getBoundingClientRect();
      return [name(frame), box.width, box.right];
    });
    const click = wanted => {
      frames.find(frame => name(frame) == wanted).dispatchEvent(new MouseEvent("click"));
      all[wanted] = look();
    };
    const post = () => {
      if (look()[0][1] < 300) return setTimeout(post, 20);  // not laid out yet
      click("load"); click("all");
      all.window = innerWidth;
      const find = document.querySelector("input.find");
      const pale = () => frames.filter(frame => frame.classList.contains("other")).map(name);
      all.pale = ["LOAD", ""].map(text => {
        find.value = text;
        find.dispatchEvent(new Event("input"));
        return pale();
      });
      fetch("/", {method: "POST", body: JSON.stringify(all)});
    };
    post();
    </script>"""
    drawn = FlameGraph(fold(read_folded(STACKS)), "A title")
    assert page("A page", [drawn, drawn]).count("<input") == 1
    graph = without_policy(page("A page", [drawn]))
    seen = json.loads(text_from_browser(graph.replace("</body>", f"{ask}</body>"), tmp_path))
    load = {name: width for name, width, _ in seen["load"]}
    assert {name: width / load["all"] for name, width in load.items()} == pytest.approx(
        {"all": 1, "main": 1, "load": 1, "read": 6 / 7, "decode": 1 / 7}, abs=0.01
    )
    assert "train" in {name for name, *_ in seen["all"]}
    assert seen["pale"] == [["all", "main", "train", "decode", "read"], []]
    assert seen["window"] < 1200
    assert max(right for _, _, right in seen["all"]) <= seen["window"]
