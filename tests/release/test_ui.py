"""Views for users: a run in MLflow's own UI and its pages, in Chromium; ``nox -s ui``.

It renews the pictures in ``docs/images``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "docs" / "images"
#: Seconds that a page may take, and bytes of a picture.
PATIENCE, LARGEST = 60.0, 200_000
WIDTH, HEIGHT = 1280, 900
#: Parts of MLflow's UI that pictures omit: the menu on the left, the assistant's button below.
MENU, BUTTON = 198, 690
#: MLflow opens its assistant unless the browser's storage, which files lack, says that it did.
VISITED = "try { localStorage['mlflow.assistant.fab.autoOpenedOnFirstLoad_v1'] = true } catch {}"
#: Columns of the terminal in the README.
COLUMNS = 88


@pytest.fixture(scope="module")
def run(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """The address of a run of the demo in the UI, its name, and the folder of its files."""
    folder = tmp_path_factory.mktemp("demo")
    options = {
        "trainer.logger.init_args.tracking_uri": mlflow_server,
        "trainer.default_root_dir": folder,
    }
    command = [
        sys.executable, str(ROOT / "examples/train_gpt.py"), "fit",
        "--config", str(ROOT / "configs/demo.yaml"),
        *(f"--{name}={value}" for name, value in options.items()),
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("lightning_perf demo")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    address = f"{mlflow_server}/#/experiments/{experiment.experiment_id}/runs/{found.info.run_id}"
    name = str(found.info.run_name)
    return address, name, folder / name


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", f"user-data-dir={profile}"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_window_size(WIDTH, HEIGHT)
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": VISITED})
    yield driver
    driver.quit()


def shows(browser: Any, *texts: str) -> str:
    """Wait until the page shows texts; returns all of its text."""

    def text(driver: Any) -> str | None:
        found = driver.find_element(By.TAG_NAME, "body").text
        return found if all(each in found for each in texts) else None

    try:
        return str(WebDriverWait(browser, PATIENCE).until(text))
    except Exception:
        print(browser.find_element(By.TAG_NAME, "body").text)
        raise


def visit(browser: Any, address: str, *texts: str) -> str:
    """Open a page of MLflow; returns the text that it shows."""
    browser.get("about:blank")  # MLflow's addresses differ behind the #, which loads nothing
    browser.get(f"{address}?workflowType=machine_learning")
    return shows(browser, *texts)


def picture(
    browser: Any, name: str, left: int = 0, bottom: int = HEIGHT, right: int = WIDTH
) -> None:
    """Save the view between two edges, in 256 colours."""
    path = IMAGES / f"{name}.png"
    shot = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    shot = shot.crop((left, 0, min(right, shot.width), min(bottom, shot.height)))
    shot.quantize(256).save(path, optimize=True)
    assert path.stat().st_size < LARGEST


def test_the_report_in_a_terminal(browser: Any, run: tuple[str, str, Path], tmp_path: Path) -> None:
    """The demo's dataset is slow: the first verdict says so, in red, with what the CPUs allow."""
    _, _, folder = run
    command = [sys.executable, "-m", "lightning_perf", "report", str(folder)]
    env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    shown, _, _ = done.stdout.partition("validation-bound")
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text.from_ansi(shown.replace(f" ({folder})", "").rstrip()))
    page = tmp_path / "terminal.html"
    page.write_text(console.export_html(theme=MONOKAI, inline_styles=True))
    browser.get(page.as_uri())
    text = shows(browser, "MFU", "input-bound", "CPUs in use")
    height = browser.execute_script("return document.querySelector('pre').scrollHeight")
    picture(browser, "demo", bottom=height + 16, right=COLUMNS * 10)
    assert "prepare the data" in text or "num_workers=1" in text


def test_the_overview_begins_with_mfu(browser: Any, run: tuple[str, str, Path]) -> None:
    """The description is shown, with MFU in its first line."""
    address, _, _ = run
    text = visit(browser, address, "Description", "batches/s", "MFU")
    description = text.partition("Description\n")[2]
    assert description.startswith("MFU ")
    picture(browser, "mlflow_overview", MENU, BUTTON)


def test_the_charts_show_mfu(browser: Any, run: tuple[str, str, Path]) -> None:
    """MFU is a curve beside throughput and times."""
    address, _, _ = run
    visit(browser, f"{address}/model-metrics", "throughput", "timings")
    search = "//input[@placeholder='Search metric charts']"
    browser.find_element(By.XPATH, search).send_keys("mfu")
    shows(browser, "mfu_causal")  # other charts are drawn when they are scrolled to
    assert browser.find_elements(By.CSS_SELECTOR, "svg .scatterlayer .point, svg .lines")
    picture(browser, "mlflow_metrics", MENU, 612)


def test_the_page_is_shown_among_the_artifacts(browser: Any, run: tuple[str, str, Path]) -> None:
    """It works in MLflow's frame, which runs scripts and has no network."""
    address, name, _ = run
    visit(browser, f"{address}/artifacts/{name}/report.html", "report.html")
    frame = WebDriverWait(browser, PATIENCE).until(
        lambda driver: driver.find_element(By.TAG_NAME, "iframe")
    )
    browser.switch_to.frame(frame)
    try:
        shows(browser, "forward", "backward")
        assert browser.find_elements(By.TAG_NAME, "svg")
    finally:
        browser.switch_to.default_content()
    picture(browser, "mlflow_report", MENU, BUTTON)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 400)])
def test_the_report_in_light_dark_and_narrow(
    browser: Any, run: tuple[str, str, Path], scheme: str, width: int
) -> None:
    """Nothing is cut off, and the colours follow the system setting."""
    _, _, folder = run
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get((folder / "report.html").as_uri())
        shows(browser, "Where the time of a batch went", "forward")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        style = "return getComputedStyle(document.body).backgroundColor"
        red = int(browser.execute_script(style).partition("(")[2].partition(",")[0])
        assert (red > 128) == (scheme == "light")
        if (scheme, width) == ("light", 1280):
            picture(browser, "report")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
