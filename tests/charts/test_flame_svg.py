"""Flame graphs: widths are shares, and what is written is valid, safe and always the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.browser import needs_browser, said_in_a_browser

from lightning_perf.charts.flame import bytes_text, flame_graph, fold, read_folded

SVG = "{http://www.w3.org/2000/svg}"
STACKS = """main;load;read 60
main;train 30
main;load;decode 10
"""


def boxes(picture: str) -> dict[str, dict[str, float]]:
    """Position and width of each frame, by its name."""
    return {
        group.get("data-name", ""): {
            key: float(group.find(f"{SVG}rect").get(key)) for key in ("x", "y", "width")
        }
        for group in ElementTree.fromstring(picture).iter(f"{SVG}g")
    }


def draw(text: str) -> str:
    return flame_graph(fold(read_folded(text)), "A title")


def test_widths_are_proportional() -> None:
    """A frame is as wide as its share, below its caller, the widest sibling first."""
    found = boxes(draw(STACKS))
    assert {name: box["width"] / 12 for name, box in found.items()} == pytest.approx(
        {"all": 100, "main": 100, "load": 70, "read": 60, "decode": 10, "train": 30}
    )
    assert {name: box["x"] / 12 for name, box in found.items()} == pytest.approx(
        {"all": 0, "main": 0, "load": 0, "read": 0, "decode": 60, "train": 70}
    )
    depths = [found[name]["y"] for name in ("all", "main", "load", "read")]
    assert depths == sorted(depths)
    assert found["decode"]["y"] == found["read"]["y"]


def test_the_order_of_stacks_does_not_matter() -> None:
    """The same stacks give the same text, whatever came first."""
    assert draw(STACKS) == draw("\n".join(reversed(STACKS.splitlines())))


def test_titles_tell_what_a_frame_holds() -> None:
    """Pointing at a frame shows its value in the unit, and its share."""
    root = fold([(["a"], 3 << 20), (["b"], 1 << 20)])
    picture = flame_graph(root, "Memory", bytes_text)
    assert "<title>a (3.0 MiB, 75.0%)</title>" in picture
    assert "Memory: 4.0 MiB" in picture


def test_names_are_text() -> None:
    """What a function or a file is called cannot become markup or script."""
    evil = """<script>alert("1")</script>&'"""
    picture = flame_graph(fold([([evil], 1)]), evil)
    assert evil in boxes(picture)
    assert picture.count("<script>") == 1


def test_frames_that_nobody_could_see_are_left_out() -> None:
    """A picture's size is bounded however many functions there are."""
    picture = flame_graph(fold([([f"f{n}"], 1) for n in range(50_000)] + [(["g"], 50_000)]), "t")
    assert set(boxes(picture)) == {"all", "g"}


def test_nothing_recorded_is_an_empty_picture() -> None:
    """No stack at all is drawn as the root alone."""
    assert set(boxes(draw(""))) == {"all"}


def test_nothing_is_loaded_from_anywhere() -> None:
    """The only address in a picture is the name of its format."""
    assert set(re.findall(r"https?://[^\"]+", draw(STACKS))) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
@needs_browser
def test_a_click_magnifies_and_a_narrow_window_holds_the_picture(tmp_path: Path) -> None:
    """In a browser a clicked frame takes the whole width, which is no more than the window's."""
    ask = """<script>
    const all = {}, frames = [...document.querySelectorAll("g")];
    const look = () => frames.filter(g => g.style.display != "none").map(g => {
      const box = g.querySelector("rect").getBoundingClientRect();
      return [g.dataset.name, box.width, box.right, g.querySelector("text").textContent];
    });
    const click = name => {
      frames.find(g => g.dataset.name == name).dispatchEvent(new MouseEvent("click"));
      all[name] = look();
    };
    const tell = () => {
      if (look()[0][1] < 300) return setTimeout(tell, 20);  // not laid out yet
      click("load"); click("all");
      all.window = innerWidth;
      fetch("/", {method: "POST", body: JSON.stringify(all)});
    };
    tell();
    </script>"""
    seen = json.loads(said_in_a_browser(f"<!doctype html>{draw(STACKS)}{ask}", tmp_path))
    load = {name: (width, text) for name, width, _, text in seen["load"]}
    full = load["all"][0]
    assert {name: width / full for name, (width, _) in load.items()} == pytest.approx(
        {"all": 1, "main": 1, "load": 1, "read": 6 / 7, "decode": 1 / 7}, abs=0.01
    )
    assert {name for name, (_, text) in load.items() if text == name} == set(load)
    assert "train" in {name for name, *_ in seen["all"]}
    assert seen["window"] < 1200
    assert max(right for _, _, right, _ in seen["all"]) <= seen["window"]
