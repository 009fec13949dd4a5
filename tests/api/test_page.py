"""The page on the real server with the real model: key, chat, stop, dashboard, under the real content security policy."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from .served import KEYS, Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def until(page: Any, condition: str) -> None:
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not tested (apt-get install chromium)")
def test_the_page_on_the_real_server(served: Served) -> None:
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(served.url)
        page.wait_for_selector("#key-dialog[open]")
        assert all("401" in error for error in errors), errors
        errors.clear()
        page.fill("#key-input", KEYS[0])
        page.keyboard.press("Enter")
        until(page, "document.getElementById('model').textContent === 'smollm2'")
        page.click("#open-settings")
        page.fill('[aria-label="Temperature, as a number"]', "0")  # the same story each time, and a long one
        page.fill('[name="max_tokens"]', "12")
        page.fill("#input", "Say hello.")
        page.press("#input", "Enter")
        page.wait_for_selector("article.assistant .note:not(:empty)")
        assert page.inner_text("article.assistant .markdown").strip()
        assert (
            "tokens" in page.inner_text("article.assistant .note") and page.locator("article.assistant .error:visible").count() == 0
        )
        page.fill('[name="max_tokens"]', "2000")
        page.fill("#input", "Tell a long story.")
        page.press("#input", "Enter")
        until(page, "[...document.querySelectorAll('article.assistant .markdown')].at(-1).textContent.length > 10")
        page.keyboard.press("Escape")
        until(page, "[...document.querySelectorAll('article.assistant .note')].at(-1).textContent.endsWith('stopped')")
        _what_the_server_must_take(page)
        page.click("#tab-dashboard")
        until(page, "/^[1-9]/.test(document.querySelectorAll('.card b')[2].textContent)")
        browser.close()
    served.until_idle()
    assert errors == []


def _what_the_server_must_take(page: Any) -> None:
    """Every field that the page can send, to the real server: a schema, odds, tools, and going on with an answer."""
    whole = "document.querySelector('#stop').hidden"
    page.click("#new-chat")
    page.fill('[aria-label="Temperature, as a number"]', "0")
    page.fill('[name="max_tokens"]', "40")
    page.check('[name="odds"]')
    page.fill('[name="schema"]', '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}')
    page.fill("#input", "Is it?")
    page.press("#input", "Enter")
    until(page, f"{whole} && document.querySelector('article.assistant figure.code') !== null")
    assert page.locator("article.assistant .tools >> text=Odds").is_visible()
    page.fill('[name="schema"]', "")
    page.fill('[name="tools"]', '[{"name": "f", "parameters": {"type": "object", "properties": {}}}]')
    page.fill('[name="max_tokens"]', "3")
    page.fill("#input", "Count to twenty.")
    page.press("#input", "Enter")
    until(page, f"{whole} && document.querySelectorAll('article').length === 4")
    before = page.locator("article.assistant .markdown").last.inner_text()
    page.locator("article.assistant .tools >> text=Go on").last.click()
    until(
        page, f"{whole} && [...document.querySelectorAll('article.assistant .markdown')].at(-1).textContent.length > {len(before)}"
    )
    assert page.locator("article.assistant .error:visible").count() == 0
