"""A real browser for the page's tests; without one they are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .fake_server import FakeServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/web" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for all of these tests; closed after them, since its event loop would stand in the way of others."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: the page is not tested (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


class Seen:
    """What went wrong in a page, and where it went."""

    def __init__(self, page: Any):
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.addresses: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self.addresses.append(request.url))

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@pytest.fixture
def page(browser: Any, fake: FakeServer) -> Iterator[Any]:
    """The page, loaded and ready; what went wrong is in `page.seen`."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(20_000)
    page.seen = Seen(page)
    page.goto(fake.url)
    page.wait_for_selector('#state[data-state="ready"]')
    yield page
    page.context.close()
