"""Pictures of the page for the documents: light, dark, on a phone, and the dashboard. Run: python tools/screenshots.py FOLDER [URL]

With the URL of a running server, its model answers; without one, a stand-in answers from a script and the numbers of the
dashboard are made up. Needs Chromium and playwright, as the page's tests do.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.web.conftest import CHROMIUM, FLAGS
from tests.web.fake_server import FakeServer, card

WIDE, PHONE = {"width": 1180, "height": 800}, {"width": 390, "height": 780}
QUESTIONS = ("What is softmax, and how is it written in Python?", "And how does a temperature change it?")
ANSWERS = (
    "**Softmax** turns any numbers into shares that add up to one:\n\n"
    "```python\ndef softmax(values):\n    top = max(values)  # keeps exp from overflowing\n"
    "    shares = [math.exp(v - top) for v in values]\n    return [s / sum(shares) for s in shares]\n```\n",
    "Each number is divided by \\(T\\) first, so that a low temperature makes the likeliest word likelier still:\n\n"
    "\\[ p_i = \\frac{e^{x_i / T}}{\\sum_{j=1}^{n} e^{x_j / T}} \\]\n\n"
    "| \\(T\\) | \\(x = 2\\) | \\(x = 1\\) | \\(x = 0\\) |\n|---:|---:|---:|---:|\n"
    "| 0.5 | 0.87 | 0.12 | 0.02 |\n| 2 | 0.51 | 0.31 | 0.19 |\n",
)


@contextlib.contextmanager
def server(url: str | None) -> Iterator[tuple[str, FakeServer | None]]:
    if url is not None:
        yield url.rstrip("/") + "/", None
        return
    fake = FakeServer()
    fake.piece, fake.pause, fake.models = 4, 0.008, [card("stand-in")]
    try:
        yield f"{fake.url}/", fake
    finally:
        fake.close()


def talk(page: Any, url: str, fake: FakeServer | None) -> None:
    page.goto(url)
    page.wait_for_selector('#state[data-state="ready"]')
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        if fake is not None:
            fake.answer = answer
        page.fill("#input", question)
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop", state="hidden", timeout=300_000)


def main(folder: pathlib.Path, url: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with server(url) as (address, fake), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, scheme, size in (("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "dark", PHONE)):
            touch = size is PHONE
            page = browser.new_context(viewport=size, color_scheme=scheme, has_touch=touch, is_mobile=touch).new_page()
            talk(page, address, fake)
            page.mouse.move(0, 0)
            page.screenshot(path=folder / f"page-{name}.png")
            if scheme == "light":
                page.click("#open-settings")
                page.screenshot(path=folder / "page-settings.png")
                page.click("#tab-dashboard")
                page.click("#close-settings")
                time.sleep(12)
                page.screenshot(path=folder / "page-dashboard.png")
            if touch:
                page.tap("#open-sidebar")
                page.screenshot(path=folder / "page-phone-sidebar.png")
            page.context.close()
        browser.close()


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python tools/screenshots.py FOLDER [URL]")
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
