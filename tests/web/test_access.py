"""The page by keyboard, by finger and by screen reader; no violation of WCAG AA that axe can find."""

from __future__ import annotations

import functools
import gzip
import pathlib
from typing import Any

import pytest

from trireme.api.app import WEB

from .acts import ask, begin, go_to, until
from .axe import axe_source, violations
from .fake_server import FakeServer

EVERYTHING = (
    "# Title\n\nWords, `code`, [a link](https://h.invalid/) and \\(x^2\\).\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```py\n# comment\nif x == 1: print('s')\n```\n\n- [x] done\n\n> quote\n\n\\[ \\frac{a}{b} \\]\n"
)


def fill(page: Any, fake: FakeServer) -> None:
    """A conversation with everything that the page can show."""
    fake.reasoning, fake.answer, fake.piece = "Thinking of it.", EVERYTHING, 60
    ask(page, "Show me everything")
    page.click('article.assistant [aria-label="Answer again"]')
    page.wait_for_selector("#stop", state="hidden")
    fake.failure = (500, "It failed.")
    ask(page, "And an error")
    fake.failure = None


@pytest.mark.parametrize("theme", ["light", "dark"])  # which differ in their colours alone
def test_axe_finds_nothing(browser: Any, fake: FakeServer, theme: str) -> None:
    look = functools.partial(violations, source=axe_source(), colours_alone=theme == "dark")
    page = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme, reduced_motion="reduce").new_page()
    go_to(page, fake)
    found = {"empty": look(page)}
    fill(page, fake)
    found["conversation"] = look(page)
    page.hover(".conversation")
    page.click("#open-settings")
    page.fill('[name="schema"]', "{")
    found["settings"] = look(page)
    page.click("#tab-dashboard")
    until(page, "/^\\d/.test(document.querySelectorAll('.card b')[0].textContent)")
    found["dashboard"] = look(page)
    page.click("#tab-chat")
    page.click("#forget")
    page.wait_for_selector("#toast")
    page.click("#key")
    found["dialog"] = look(page)
    page.context.close()
    assert {name: some for name, some in found.items() if some} == {}


def test_on_a_phone_nothing_hides_and_everything_can_be_touched(browser: Any, fake: FakeServer) -> None:
    page = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).new_page()
    go_to(page, fake)
    fill(page, fake)
    small = """() => [...document.querySelectorAll('button, select, input, textarea, summary')].filter((node) => {
        const box = node.getBoundingClientRect();
        const small = box.height < 43.5 || (node.matches('button, select') && box.width < 24);
        return box.width && small && !node.closest('[hidden], .task') && !node.matches('input[type=checkbox], #input, .odd');
    }).map((node) => `${node.id || node.className} ${node.getAttribute('aria-label') || node.textContent}`)"""
    unseen = """() => [...document.querySelectorAll('button')].filter((node) => node.checkVisibility()
        && !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })).map((node) => node.outerHTML)"""
    assert page.evaluate(small) == [] and page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#open-sidebar")
    assert (
        page.evaluate(small) == []
        and page.evaluate("getComputedStyle(document.querySelector('.conversation .icon')).opacity") == "1"
    )
    page.tap('[aria-label^="Delete Show"]')
    page.tap("#toast >> text=Undo")
    page.wait_for_selector("article.assistant")
    assert page.evaluate(unseen) == []
    page.context.close()


def test_tabs_turn_by_arrow_keys(page: Any) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#dashboard") and page.evaluate("document.activeElement.id") == "tab-dashboard"
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#chat") and page.evaluate("document.activeElement.id") == "tab-chat"
    assert page.get_attribute("#tab-dashboard", "tabindex") == "-1"


def test_an_answer_is_announced_at_its_start_and_end_alone(page: Any, fake: FakeServer) -> None:
    page.evaluate("""() => {
        window.said = [];
        new MutationObserver(() => window.said.push(document.querySelector('#announce').textContent)).observe(
            document.querySelector('#announce'), { childList: true, characterData: true, subtree: true });
    }""")
    fake.answer = "one two three four five six"
    ask(page)
    until(page, "window.said.length >= 2")
    assert page.evaluate("window.said") == ["Trireme answers.", "The answer is complete: 6 words."]
    quiet = "document.querySelector('#messages').closest('[aria-live], [role=status], [role=alert], [role=log]')"
    assert page.evaluate(quiet) is None


def test_everything_can_be_done_by_keyboard(page: Any, fake: FakeServer) -> None:
    begin(page, fake)
    page.keyboard.press("Escape")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator("article.assistant .note").inner_text().endswith("stopped")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector("#empty", state="visible")
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "close-settings"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings" and page.is_hidden("#settings")
    page.focus(".conversation .title")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Rename Go on"


def test_a_script_that_does_not_run_is_told(browser: Any, fake: FakeServer) -> None:
    page = browser.new_context().new_page()
    page.route("**/app.js", lambda route: route.fulfill(status=403))
    page.goto(fake.url)
    page.evaluate("document.getAnimations().find((one) => one.animationName === 'stuck').finish()")  # five seconds later
    page.wait_for_selector("#stuck", state="visible")
    assert "proxy_set_header Host" in page.inner_text("#stuck")
    page.context.close()


def test_nothing_but_its_own_files_may_run_or_be_asked_for(page: Any) -> None:
    page.evaluate("""() => {
        window.refused = [];
        document.addEventListener('securitypolicyviolation', (event) => window.refused.push(event.effectiveDirective));
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        const image = document.createElement('img');
        image.src = 'https://elsewhere.invalid/pixel.png';
        const style = document.createElement('style');
        style.textContent = 'body { color: red }';
        document.body.append(script, image, style);
        fetch('https://elsewhere.invalid/').catch(() => {});
    }""")
    until(page, "window.refused.length >= 4")
    assert sorted(page.evaluate("window.refused")) == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.evaluate("window.ran") is None


def test_the_page_is_small() -> None:
    files = [file for file in pathlib.Path(WEB).iterdir() if file.is_file()]
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) < 150_000
    assert not [file.name for file in files if "http://" in file.read_text().replace("http://www.w3.org", "").replace('"http:', "")]
