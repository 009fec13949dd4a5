"""The page in a real browser: people chat, stop, edit and come back; nothing that a model writes runs, loads or breaks it."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from .acts import ask, until, wait_for
from .conftest import Seen
from .corpus import HOSTILE
from .fake_server import FakeServer


def test_a_conversation(page: Any, fake: FakeServer) -> None:
    fake.answer, fake.piece, fake.pause = "It is **four**.", 2, 0.02
    answer = ask(page, "What is 2 + 2?")
    assert answer.locator(".markdown").inner_html() == "<p>It is <strong>four</strong>.</p>"
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · first after [\d,]+ ms", answer.locator(".note").inner_text())
    fake.answer, fake.piece = "Five.", 7
    ask(page, "And 2 + 3?")
    assert [(m["role"], m["content"]) for m in fake.requests[1]["messages"]] == [
        ("user", "What is 2 + 2?"),
        ("assistant", "It is **four**."),
        ("user", "And 2 + 3?"),
    ]
    assert page.inner_text("#context") == "22 of 8,192 tokens"
    assert page.seen.errors == []


def test_stop_keeps_what_has_come(page: Any, fake: FakeServer) -> None:
    fake.answer, fake.piece, fake.pause = "word " * 400, 5, 0.02
    page.fill("#input", "Go on")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('article.assistant .markdown').textContent.length > 20")
    page.click("#stop")
    page.wait_for_selector("#send:not([hidden])")
    answer = page.locator("article.assistant")
    assert 20 < len(answer.locator(".markdown").inner_text()) < 2000
    assert answer.locator(".note").inner_text().endswith("stopped")
    assert page.seen.errors == []


def test_regenerate_and_edit(page: Any, fake: FakeServer) -> None:
    ask(page, "First")
    fake.answer = "Again."
    page.click('article.assistant [aria-label="Answer again"]')
    until(page, "document.querySelector('article.assistant .markdown').textContent === 'Again.'")
    page.wait_for_selector("#send:not([hidden])")
    assert fake.requests[1]["messages"] == fake.requests[0]["messages"]
    page.hover("article.user")
    page.click('article.user [aria-label="Edit and send again"]')
    page.fill("article.user textarea", "Second")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:not([hidden])")
    until(page, "document.querySelector('article.user .text').textContent === 'Second'")
    assert [m["content"] for m in fake.requests[2]["messages"]] == ["Second"]
    assert page.seen.errors == []


def test_history_outlives_the_page(page: Any, fake: FakeServer) -> None:
    ask(page, "One")
    page.click("#new-chat")
    ask(page, "Two")
    page.reload()
    page.wait_for_selector('#state[data-state="ready"]')
    assert page.locator(".conversation .title").all_inner_texts() == ["Two", "One"]
    page.click(".conversation >> nth=1")
    assert page.inner_text("article.user .text") == "One"
    page.hover(".conversation >> nth=1")
    page.click('[aria-label="Delete One"]')
    assert page.locator(".conversation .title").all_inner_texts() == ["Two"]
    assert page.seen.errors == []


def test_settings_go_with_the_request(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.fill('[aria-label="Temperature, as a number"]', "0.3")
    page.fill('[name="max_tokens"]', "64")
    page.fill('[name="system"]', "Be brief.")
    page.fill('[name="stop"]', "END\n###")
    ask(page)
    body = fake.requests[0]
    assert (body["temperature"], body["max_tokens"], body["stop"], body["model"]) == (0.3, 64, ["END", "###"], "smollm2")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."} and body["top_p"] == 0.9
    page.click("#reset")
    ask(page)
    assert fake.requests[1]["temperature"] == 0.2 and "max_tokens" not in fake.requests[1]
    assert fake.requests[1]["messages"][0]["role"] == "user"


def test_reasoning_is_shown_apart(page: Any, fake: FakeServer) -> None:
    fake.reasoning, fake.answer = "Two and two.", "Four."
    answer = ask(page)
    assert answer.locator(".thoughts .text").inner_text().strip() == "Two and two."
    assert answer.locator(".markdown").inner_text().strip() == "Four."
    ask(page, "more")
    assert "Two and two." not in json.dumps(fake.requests[1]), "reasoning is not sent back"


def test_an_error_is_told(page: Any, fake: FakeServer) -> None:
    fake.failure = (400, "This model's maximum context length is 8192 tokens; this request needs 9000.")
    answer = ask(page)
    assert answer.locator(".error").inner_text() == fake.failure[1]


def test_a_key_is_asked_for(browser: Any) -> None:
    fake = FakeServer(key="secret")
    page = browser.new_page()
    page.goto(fake.url)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-input", "secret")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('model').textContent === 'smollm2'")
    page.close()
    fake.close()


def test_markdown_becomes_elements(page: Any, fake: FakeServer) -> None:
    fake.answer = (
        "# Title\n\nA *b* **c** `d<e>` ~~f~~ snake_case_name 2*3*4 [g](https://h.invalid/i_(j)) https://k.invalid/l.\n\n"
        "1. one\n2. two\n   - in\n   - side\n\n| a | b |\n|:--|--:|\n| 1 | `x|y` |\n\n"
        "```py\nif x < 1:  # <b>\n    pass\n```\n> q\n\n- [x] done\n"
    )
    html = ask(page).locator(".markdown").inner_html()
    for part in (
        "<h2>Title</h2>",
        "<em>b</em> <strong>c</strong> <code>d&lt;e&gt;</code> <del>f</del> snake_case_name",
        '<a href="https://h.invalid/i_(j)" target="_blank" rel="noopener noreferrer nofollow">g</a>',
        ">https://k.invalid/l</a>.</p>",
        "<ol><li>one</li><li>two<ul><li>in</li><li>side</li></ul></li></ol>",
        '<td class="right"><code>x|y</code></td>',
        '<span class="c-comment"># &lt;b&gt;</span>',
        "<blockquote><p>q</p></blockquote>",
        '<li class="task"><input type="checkbox" disabled="" checked="" aria-label="done">done</li>',
    ):
        assert part in html, (part, html)
    assert page.seen.errors == []


def test_code_and_answers_can_be_copied(page: Any, fake: FakeServer) -> None:
    fake.answer = "Run:\n\n```sh\nls -l\n```\nor not."
    answer = ask(page)
    assert answer.locator("figcaption span").inner_text() == "sh"

    def pasted() -> str:
        page.fill("#input", "")
        page.focus("#input")
        page.keyboard.press("Control+V")
        return str(page.input_value("#input"))

    for label, text in (("Copy the code", "ls -l"), ("Copy", fake.answer)):
        answer.locator(f'[aria-label="{label}"]').click()
        wait_for(lambda text=text: pasted() == text, label)
    page.evaluate("void Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as without HTTPS
    answer.locator('[aria-label="Copy the code"]').click()
    wait_for(lambda: pasted() == "ls -l")


def test_streaming_gives_the_same_as_the_whole(page: Any, fake: FakeServer) -> None:
    fake.answer = "Intro\n\n- a\n- b\n\n  c\n\n```js\nlet x = `1`;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n**end** of *it*\n"
    fake.piece = 3
    streamed = ask(page).locator(".markdown").inner_html()
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("article.assistant .markdown").inner_html() == streamed


def wrong_in(page: Any) -> list[str]:
    """Elements, addresses and attributes in the answers shown that a text of a model must never become."""
    script = """() => {
        const kinds = "script img iframe object embed style link meta form base".split(" ").join(",");
        const parts = [...document.querySelectorAll("article.assistant *")];
        const leads = (link) => /^(https?|mailto):/.test(link.getAttribute("href")) && link.rel === "noopener noreferrer nofollow";
        const bad = (part) => part.matches(kinds) || part.getAttributeNames().some((name) => name.startsWith("on"))
            || (part.matches("a") && !leads(part));
        return parts.filter(bad).map((part) => part.outerHTML.slice(0, 200));
    }"""
    found: list[str] = page.evaluate(script)
    return found


def test_no_text_of_a_model_runs_or_loads_anything(page: Any, fake: FakeServer, tmp_path: pathlib.Path) -> None:
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text, "reasoning": text}] for text in HOSTILE]
    alone = [{"title": turn[0]["content"], "messages": turn[:1]} for turn in turns]
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps([*alone, {"messages": [message for turn in turns for message in turn]}]))
    page.click("#open-settings")
    page.set_input_files("#import-file", str(file))
    until(page, f"document.querySelectorAll('article.assistant').length === {len(HOSTILE)}")
    assert page.locator("article.assistant a").count() > 3  # the check has links to look at
    assert wrong_in(page) == []
    page.click("#new-chat")
    for at in range(0, len(HOSTILE), 8):  # streamed, piece by piece
        fake.answer = fake.reasoning = "\n\n".join(HOSTILE[at : at + 8])
        fake.piece = len(fake.answer) // 40
        ask(page, HOSTILE[at])
        assert wrong_in(page) == []
    page.reload()  # and from the history
    page.wait_for_selector("article.assistant")
    assert wrong_in(page) == []
    assert page.evaluate("window.broken") is None
    assert page.seen.dialogs == [] and page.seen.errors == []
    assert {address for address in page.seen.addresses if not address.startswith(fake.url)} - {"about:blank"} <= {
        address for address in page.seen.addresses if address.startswith("data:image/svg+xml")
    }


def test_a_long_answer_stays_fluent(page: Any, fake: FakeServer) -> None:
    fake.answer, fake.piece = "".join(f"## Part {i}\n\nSome *text* with `code` and **more** of it.\n\n" for i in range(600)), 400
    answer = ask(page)
    assert answer.locator("h3").count() == 600
    assert page.seen.errors == []


def test_the_dashboard_shows_the_load(page: Any, fake: FakeServer) -> None:
    page.click("#tab-dashboard")
    until(page, "/^\\d/.test(document.querySelectorAll('.card b')[0].textContent)")
    shown = dict(zip(page.locator(".card span").all_inner_texts(), page.locator(".card b").all_inner_texts(), strict=True))
    assert shown["Prefix cache"] == "63%" and shown["Running"].isdigit() and shown["Time to first token"].endswith("ms")
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    painted = page.evaluate(f"[...document.querySelectorAll('canvas')].map(c => {pixels}.some(v => v))")
    assert painted == [True] * 6
    page.evaluate("document.querySelector('#theme').click()")
    assert page.seen.errors == []


def test_it_works_on_a_small_screen(browser: Any, fake: FakeServer) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640})
    seen = Seen(page)
    page.goto(fake.url)
    page.wait_for_selector('#state[data-state="ready"]')
    fake.answer = "| Server | tokens/s | note |\n|---|---:|---|\n| Trireme | 103 | a remark that needs more than one line |"
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    heights = page.evaluate("[...document.querySelectorAll('th')].map(cell => cell.getBoundingClientRect().height)")
    assert max(heights) < 45, "a word of a table was broken over two lines"
    page.click("#tab-dashboard")
    until(page, "/^\\d/.test(document.querySelectorAll('.card b')[0].textContent)")
    ends = page.evaluate("[...document.querySelectorAll('.card, .card b, .chart')].map(part => part.getBoundingClientRect().right)")
    assert max(ends) <= 360, "a part of the dashboard lies outside"
    page.click("#tab-chat")
    page.click("#open-settings")
    page.keyboard.press("Escape")
    page.wait_for_selector("#settings", state="hidden")
    page.click("#open-sidebar")
    page.keyboard.press("Escape")
    page.wait_for_selector("#new-chat", state="hidden")
    page.click("#open-sidebar")
    page.click("#open-settings")  # beside the sidebar, which only closes
    page.wait_for_selector("#new-chat", state="hidden")
    assert page.is_hidden("#settings")
    page.click("#open-sidebar")
    page.wait_for_selector("#new-chat", state="visible")
    page.click("#new-chat")
    page.wait_for_selector("#empty", state="visible")
    assert seen.errors == []
    page.close()
