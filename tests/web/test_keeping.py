"""The page loses nothing: tabs, reloads, versions, deletion, files, a full store."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from .acts import ask, begin, go_to, kept, texts, titles, until, wait_for
from .conftest import Seen
from .fake_server import FakeServer


def second_tab(page: Any, fake: FakeServer) -> Any:
    other = page.context.new_page()
    other.seen = Seen(other)
    return go_to(other, fake)


def test_two_tabs_keep_each_others_conversations(page: Any, fake: FakeServer) -> None:
    other = second_tab(page, fake)
    ask(page, "From A")
    other.click("#new-chat")
    ask(other, "From B")
    page.bring_to_front()
    ask(page, "A again")
    for tab in (page, other):
        until(tab, "document.querySelectorAll('.conversation').length === 2")
    assert sorted(titles(page)) == ["From A", "From B"]
    assert sorted(len(record["messages"]) for record in kept(page)) == [2, 4]
    assert page.seen.errors == other.seen.errors == []


def test_two_tabs_in_one_conversation_lose_no_message(page: Any, fake: FakeServer) -> None:
    ask(page, "One")
    other = second_tab(page, fake)
    other.wait_for_selector("article.assistant")
    ask(other, "Two")
    until(page, "document.querySelectorAll('article').length === 4")  # it shows what the other has asked
    page.bring_to_front()
    ask(page, "Three")
    until(other, "document.querySelectorAll('article').length === 6")
    assert [text for text in texts(other) if text != "Hello."] == ["One", "Two", "Three"]


def test_a_reload_in_mid_answer_shows_what_was_there_and_goes_on(page: Any, fake: FakeServer) -> None:
    begin(page, fake)
    wait_for(lambda: any(m["content"].startswith("word") for r in kept(page) for m in r["messages"]), "saved while it streams")
    page.reload()
    page.wait_for_selector("article.assistant .broken:visible")
    assert texts(page)[0] == "Go on" and texts(page)[1].startswith("word")
    before = texts(page)[1]
    fake.answer, fake.pause = " and the end.", 0
    page.click("article.assistant .broken button")
    until(page, "document.querySelector('article.assistant .markdown').textContent.endsWith('and the end.')")
    body = fake.requests[-1]
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant" and body["messages"][-1]["content"].strip() == before
    assert page.locator(".broken:visible").count() == 0 and page.seen.errors == []


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Any, fake: FakeServer) -> None:
    begin(page, fake, "Long")
    page.click("#new-chat")
    fake.answer = "Short."
    assert ask(page, "Quick").locator(".markdown").inner_text() == "Short."
    page.click(".conversation .title:has-text('Long')")
    length = "document.querySelector('article.assistant .markdown').textContent.length"
    first = page.evaluate(length)
    until(page, f"{length} > {first}")
    assert page.is_visible("#stop")
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden")
    assert page.seen.errors == []


def test_versions_of_answers_and_questions(page: Any, fake: FakeServer) -> None:
    fake.answer = "First answer."
    ask(page, "Question")
    fake.answer = "Later."
    ask(page, "Next")
    fake.answer = "Second answer."
    page.click('article.assistant >> nth=0 >> [aria-label="Answer again"]')
    until(page, "document.querySelectorAll('article').length === 2")
    page.wait_for_selector("#stop", state="hidden")
    assert page.inner_text("article.assistant .count") == "2/2"
    page.click('article.assistant [aria-label="Earlier version"]')
    assert texts(page) == ["Question", "First answer.", "Next", "Later."]
    page.hover("article.user >> nth=0")
    page.click('article.user >> nth=0 >> [aria-label="Edit and send again"]')
    page.fill("article.user textarea", "Better question")
    fake.answer = "Third answer."
    page.keyboard.press("Enter")
    until(page, "document.querySelector('article.assistant .markdown').textContent === 'Third answer.'")
    page.wait_for_selector("#stop", state="hidden")
    page.reload()
    page.wait_for_selector("article.user .count:visible")
    assert page.inner_text("article.user .count") == "2/2" and texts(page) == ["Better question", "Third answer."]
    page.hover("article.user")
    page.click('article.user [aria-label="Earlier version"]')
    assert texts(page)[0] == "Question" and len(kept(page)[0]["messages"]) == 7
    assert page.seen.errors == []


def test_an_answer_is_edited(page: Any, fake: FakeServer) -> None:
    ask(page, "Colour?")
    page.click('article.assistant [aria-label="Edit this answer"]')
    page.fill("article.assistant textarea", "Blue, and")
    page.keyboard.press("Control+Enter")
    assert texts(page) == ["Colour?", "Blue, and"] and page.inner_text("article.assistant .count") == "2/2"
    fake.answer = " green."
    page.click("article.assistant .tools >> text=Go on")
    until(page, "document.querySelector('article.assistant .markdown').textContent === 'Blue, and green.'")
    assert fake.requests[-1]["messages"][-1] == {"role": "assistant", "content": "Blue, and"}


def test_a_deleted_conversation_can_be_taken_back(page: Any, fake: FakeServer) -> None:
    ask(page, "Precious")
    page.hover(".conversation")
    page.click('[aria-label="Delete Precious"]')
    wait_for(lambda: kept(page) == [])
    assert "Precious" not in titles(page)
    page.click("#toast >> text=Undo")
    assert titles(page) == ["Precious"] and texts(page) == ["Precious", "Hello."]
    wait_for(lambda: len(kept(page)) == 1)
    page.click("#open-settings")
    page.click("#forget")
    wait_for(lambda: kept(page) == [])
    page.click("#toast >> text=Undo")
    wait_for(lambda: len(kept(page)) == 1)
    assert page.seen.errors == [] and page.seen.dialogs == []


def test_a_draft_outlives_a_reload(page: Any, fake: FakeServer) -> None:
    ask(page, "First")
    page.fill("#input", "half a thought")
    wait_for(lambda: kept(page)[0].get("draft") == "half a thought")
    page.reload()
    until(page, "document.querySelector('#input').value === 'half a thought'")


def test_conversations_leave_and_come_in_as_files(page: Any, fake: FakeServer, tmp_path: pathlib.Path) -> None:
    ask(page, "One")
    page.click("#new-chat")
    ask(page, "Two")
    page.click("#open-settings")
    with page.expect_download() as waiting:
        page.click("#export-all")
    whole = pathlib.Path(tmp_path / "all.json")
    waiting.value.save_as(whole)
    with page.expect_download() as waiting:
        page.click("#export")
    single = json.loads(pathlib.Path(waiting.value.path()).read_text())
    assert [one["title"] for one in single["conversations"]] == ["Two"]
    page.click("#forget")
    wait_for(lambda: kept(page) == [])
    page.set_input_files("#import-file", str(whole))
    wait_for(lambda: len(kept(page)) == 2)
    page.set_input_files("#import-file", str(whole))  # twice is once
    page.wait_for_selector("#toast:has-text('2 conversations came in')")
    assert sorted(titles(page)) == ["One", "Two"] and len(kept(page)) == 2
    plain = tmp_path / "plain.json"
    plain.write_text(
        json.dumps({"title": "Plain", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    )
    page.set_input_files("#import-file", str(plain))
    until(page, "document.querySelectorAll('.conversation').length === 3")
    assert texts(page) == ["Hi", "Ho"]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    page.set_input_files("#import-file", str(broken))
    page.wait_for_selector("#toast:has-text('No conversation was found')")
    assert page.seen.errors == []


def test_a_full_store_is_told(page: Any, fake: FakeServer) -> None:
    page.evaluate("void (IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); })")
    ask(page, "Where does this go?")
    page.wait_for_selector("#notice:has-text('storage is full')")
    assert texts(page) == ["Where does this go?", "Hello."]
    with page.expect_download():
        page.click("#notice >> text=Export all")


def test_conversations_of_the_older_page_are_taken_over(page: Any, fake: FakeServer) -> None:
    older = [
        {
            "id": "x",
            "title": "Old",
            "changed": 1,
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
        }
    ]
    page.evaluate(f"localStorage.setItem('trireme.conversations', {json.dumps(json.dumps(older))})")
    page.reload()
    until(page, "document.querySelectorAll('.conversation').length === 1")
    page.click(".conversation .title")
    assert texts(page) == ["Q", "A"] and len(kept(page)) == 1
    assert page.evaluate("localStorage.getItem('trireme.conversations')") is None


def test_a_question_that_is_too_long_comes_back(page: Any, fake: FakeServer) -> None:
    for text in ("One", "Two", "Three"):
        ask(page, text)
    fake.failure = (400, "This model's maximum context length is 8192 tokens; this request needs 9000.")
    fake.failure_code = "context_length_exceeded"
    page.fill("#input", "A very long text")
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice:has-text('maximum context length')")
    assert page.input_value("#input") == "A very long text" and len(texts(page)) == 6
    fake.failure = None
    page.click("#notice >> text=Leave out the oldest and send")
    until(page, "document.querySelectorAll('article').length === 8")
    page.wait_for_selector("#stop", state="hidden")
    sent = [m["content"] for m in fake.requests[-1]["messages"]]
    assert sent[-1] == "A very long text" and "One" not in sent and len(sent) < 7
    assert page.locator("article.left-out").count() == 8 - len(sent) - 1
    assert page.input_value("#input") == ""


def test_a_strange_file_harms_nothing(page: Any, fake: FakeServer, tmp_path: pathlib.Path) -> None:
    strange = {
        "role": "assistant",
        "content": "Fine.",
        "files": 3,
        "calls": [None, {"name": 1}],
        "odds": [[1]],
        "thought": "x",
        "usage": 7,
    }
    ring = [{"id": "a", "parent": "b", "role": "user", "content": "A"}, {"id": "b", "parent": "a", **strange}]
    several = [
        {"messages": ring, "settings": {"stop": [], "system": "S"}, "title": ["T"]},
        {"messages": [strange, 3]},
        None,
        {"messages": 1},
    ]
    file = tmp_path / "strange.json"
    file.write_text(json.dumps(several))
    page.click("#open-settings")
    page.set_input_files("#import-file", str(file))
    page.wait_for_selector("#toast:has-text('2 conversations came in')")
    for title in page.locator(".conversation .title").all():
        title.click()
        assert "Fine." in texts(page)
    assert ask(page, "And now?").locator(".markdown").inner_text() == "Hello."
    assert page.seen.errors == []
