"""A real browser for the page's tests; without one they are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .acts import go_to
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

    def forget(self) -> None:
        for kept in (self.errors, self.dialogs, self.addresses):
            kept.clear()


@pytest.fixture(scope="package")
def tab(browser: Any) -> Iterator[Any]:
    """One tab for many tests. Each opens another server in it, whose port makes what the browser keeps for it its own."""
    tab = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce").new_page()
    tab.set_default_timeout(20_000)
    tab.seen = Seen(tab)
    yield tab
    tab.context.close()


@pytest.fixture
def page(tab: Any, fake: FakeServer) -> Iterator[Any]:
    """The page, loaded and ready; what went wrong is in `page.seen`."""
    tab.seen.forget()
    yield go_to(tab, fake)
    for other in tab.context.pages:
        if other is not tab:
            other.close()
    tab.goto("about:blank")  # before its server goes


@pytest.fixture(scope="package")
def functions(browser: Any) -> Iterator[Any]:
    """A tab whose modules' functions are called; nobody asks anything in it."""
    server = FakeServer()
    tab = browser.new_context().new_page()
    yield go_to(tab, server)
    tab.context.close()
    server.close()
