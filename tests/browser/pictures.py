"""Makes the pictures of docs/dashboard.md.

python -m tests.browser.pictures            every panel of the page of one run, of sample data
python -m tests.browser.pictures RUN RUN    the comparison of two real runs, from their folders
"""

import argparse
import base64
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium.webdriver.chrome.webdriver import WebDriver

from tests.browser import samples
from tests.browser.chromium import resize, start_chromium
from tests.browser.pages import served, served_comparison

FOLDER = Path("docs/images")
PANELS = (
    *("learning", "pools", "staleness", "weights"),
    *("trust", "correction", "accounting", "trajectory"),
)
_BOX = """
    const box = document.getElementById(arguments[0]).getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
"""
_MARGIN = 6
_ONE = f"#g{samples.GROUPS[1]}/1"  # the trajectory that is shown
_SETTLED_S = 2.0  # two drawings


def take(browser: WebDriver, name: str, box: tuple[float, float, float, float]) -> None:
    """Write a part of the page, in CSS pixels: left, top, width, height."""
    clip = {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}
    answer = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    with Image.open(BytesIO(base64.b64decode(answer["data"]))) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)  # a third of the bytes
    few.save(FOLDER / f"{name}.png", optimize=True)


def open_whole(browser: WebDriver, address: str, width: int, theme: str) -> None:
    """Open the page in a window as high as it is."""
    resize(browser, width, theme=theme)
    browser.get("about:blank")
    browser.get(address)
    time.sleep(_SETTLED_S)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    resize(browser, width, height, theme=theme)
    time.sleep(_SETTLED_S)


def take_turns(browser: WebDriver) -> None:
    """Take a trajectory of several turns."""
    with served(samples.Run(agents=True)) as server:
        open_whole(browser, f"{server.address}{_ONE}", 1280, "light")
        left, top, width, height = browser.execute_script(_BOX, "one")
        around = (width + 2 * _MARGIN, height + 2 * _MARGIN)
        take(browser, "dashboard-turns-light", (left - _MARGIN, top - _MARGIN, *around))


def take_comparison(browser: WebDriver, folders: Sequence[Path]) -> None:
    """Take the page of several runs, light and dark."""
    with served_comparison(folders) as address:
        for theme in ("light", "dark"):
            open_whole(browser, address, 1280, theme)
            height = browser.execute_script("return document.documentElement.scrollHeight")
            take(browser, f"compare-{theme}", (0, 0, 1280, height))


def main() -> None:
    """Take the pictures, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders of real runs")
    runs: list[Path] = parser.parse_args().runs
    FOLDER.mkdir(exist_ok=True)
    browser = start_chromium()
    try:
        if runs:
            take_comparison(browser, runs)
        else:
            take_samples(browser)
    finally:
        browser.quit()


def take_samples(browser: WebDriver) -> None:
    """Take every panel of the page of one run."""
    with served(samples.Run(reference=True, critic=True)) as server:
        for theme in ("light", "dark"):
            open_whole(browser, f"{server.address}{_ONE}", 1280, theme)
            take(browser, f"dashboard-overview-{theme}", (0, 0, 1280, 940))
            for panel in PANELS:
                left, top, width, height = browser.execute_script(_BOX, panel)
                around = (width + 2 * _MARGIN, height + 2 * _MARGIN)
                take(
                    browser, f"dashboard-{panel}-{theme}", (left - _MARGIN, top - _MARGIN, *around)
                )
            open_whole(browser, f"{server.address}{_ONE}", 390, theme)
            take(browser, f"dashboard-phone-{theme}", (0, 0, 390, 1400))
    take_turns(browser)


if __name__ == "__main__":
    main()
