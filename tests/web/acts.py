"""What people do in the page, and how a test waits for what follows."""

from __future__ import annotations

import time
from typing import Any

from .fake_server import FakeServer


def ask(page: Any, text: str = "Hello?") -> Any:
    """Sends a message and waits for the whole answer; returns it."""
    page.fill("#input", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:not([hidden])")
    return page.locator("article.assistant").last


def until(page: Any, condition: str) -> None:
    """Waits for a condition in the page. (Playwright's own way would need a looser content security policy.)"""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def wait_for(condition: Any, what: str = "") -> None:
    """Waits for a condition in the test."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def begin(page: Any, fake: FakeServer, text: str = "Go on") -> None:
    """Sends a message that is answered slowly, and waits for the first of its words."""
    fake.answer, fake.piece, fake.pause = "word " * 400, 5, 0.02
    page.fill("#input", text)
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('article.assistant .markdown')].at(-1)?.textContent.length > 20")


def go_to(page: Any, fake: FakeServer) -> Any:
    """Loads the page and waits until it is ready."""
    page.goto(fake.url)
    page.wait_for_selector('#state[data-state="ready"]')
    return page


def texts(page: Any) -> list[str]:
    """What is said in the conversation that is shown."""
    return [text.strip() for text in page.locator("article .text:visible:not(.thoughts .text)").all_inner_texts()]


def titles(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(".conversation .title > span").all_inner_texts()]


def kept(page: Any) -> list[dict[str, Any]]:
    """The records in this browser."""
    script = """() => new Promise((resolve) => {
        const opening = indexedDB.open("trireme", 1);
        opening.onsuccess = () => {
            const reading = opening.result.transaction("conversations").objectStore("conversations").getAll();
            reading.onsuccess = () => { opening.result.close(); resolve(reading.result); };
        };
    })"""
    found: list[dict[str, Any]] = page.evaluate(script)
    return found
