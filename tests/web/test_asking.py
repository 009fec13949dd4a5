"""What goes with a question: sampling that makes sense, settings, presets, files, tools, schemas, a line of questions."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from .acts import ask, begin, go_to, texts, titles, until, wait_for
from .fake_server import FakeServer, card


def test_the_models_own_sampling_applies_and_is_shown(page: Any, fake: FakeServer) -> None:
    ask(page)
    assert (fake.requests[0]["temperature"], fake.requests[0]["top_p"]) == (0.2, 0.9)
    page.click("#open-settings")
    assert page.get_attribute('[aria-label="Temperature, as a number"]', "placeholder") == "0.2"
    assert page.get_attribute('[aria-label="Top k, as a number"]', "placeholder") == "0"
    assert "those of trireme chat" in page.inner_text("#advice")


def test_a_switch_between_the_names_that_are_served(page: Any, fake: FakeServer) -> None:
    fake.models = [
        card("small"),
        card("large", max_model_len=100, sampling={"temperature": 0.7, "top_k": 20}, sampling_source="model"),
    ]
    page.reload()
    page.wait_for_selector("#model select")
    page.select_option("#model select", "large")
    ask(page)
    body = fake.requests[0]
    assert (body["model"], body["temperature"], body["top_k"], "top_p" in body) == ("large", 0.7, 20, False)
    assert page.inner_text("#context") == "22 of 100 tokens"
    page.click("#open-settings")
    assert "makers recommend" in page.inner_text("#advice") and page.input_value('[name="model"]') == "large"


def test_settings_belong_to_their_conversation(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.fill('[name="system"]', "Speak French.")
    ask(page, "One")
    page.click("#new-chat")
    assert page.input_value('[name="system"]') == ""
    page.fill('[aria-label="Temperature, as a number"]', "1.5")
    ask(page, "Two")
    assert fake.requests[1]["temperature"] == 1.5 and fake.requests[1]["messages"][0]["role"] == "user"
    page.click("#defaults")
    page.click("#new-chat")
    ask(page, "Three")
    assert fake.requests[2]["temperature"] == 1.5
    page.click(".conversation .title:has-text('One')")
    assert page.input_value('[name="system"]') == "Speak French."
    ask(page, "Encore")
    assert (
        fake.requests[3]["messages"][0] == {"role": "system", "content": "Speak French."} and fake.requests[3]["temperature"] == 0.2
    )
    assert page.seen.errors == []


def test_presets(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.fill('[name="system"]', "You are a pirate.")
    page.fill("#preset-name", "Pirate")
    page.click("#preset-save")
    page.reload()
    page.wait_for_selector('#state[data-state="ready"]')
    page.click("#new-chat")
    page.click("#open-settings")
    page.click("#reset")
    page.select_option("#preset", "Pirate")
    ask(page)
    assert fake.requests[0]["messages"][0]["content"] == "You are a pirate."
    page.click("#preset-remove")
    assert page.locator("#preset option").count() == 1
    page.click("#toast >> text=Undo")
    assert page.locator("#preset option").count() == 2


def test_a_question_waits_while_an_answer_comes(page: Any, fake: FakeServer) -> None:
    begin(page, fake, "First")
    fake.answer = "Short."
    page.fill("#input", "Second")
    page.keyboard.press("Enter")
    page.fill("#input", "Third")
    page.keyboard.press("Enter")
    assert page.locator("#queue li").count() == 2 and len(fake.requests) == 1
    page.click('#queue [aria-label="Take out of the line"] >> nth=1')
    page.click("#stop")
    page.click("#queue >> text=Send now")
    until(page, "document.querySelectorAll('article').length === 4")
    page.wait_for_selector("#stop", state="hidden")
    assert texts(page)[2:] == ["Second", "Short."] and page.is_hidden("#queue")
    fake.answer = "a b c d e f g h " * 3
    page.fill("#input", "Fourth")
    page.keyboard.press("Enter")
    page.fill("#input", "Fifth")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('article').length === 8")
    assert texts(page)[6] == "Fifth"
    assert page.seen.errors == []


def test_text_files_go_with_a_question_and_images_are_refused(page: Any, fake: FakeServer, tmp_path: pathlib.Path) -> None:
    note, image, binary = tmp_path / "notes.md", tmp_path / "cat.png", tmp_path / "x.bin"
    note.write_text("# Title\n```py\nx\n```\n")
    image.write_bytes(b"\x89PNG")
    binary.write_bytes(b"\xff\xfe\x00\x01")
    page.set_input_files("#file", [str(note), str(image), str(binary)])
    page.wait_for_selector("#notice:has-text('cat.png was not added: the model that is served reads text, no images.')")
    assert "x.bin was not added: it is not text." in page.inner_text("#notice")
    ask(page, "What is this?")
    assert fake.requests[0]["messages"][0]["content"] == "What is this?\n\nnotes.md\n````\n# Title\n```py\nx\n```\n````"
    assert page.inner_text("article.user .chip") == "notes.md" and page.is_hidden("#files")
    paste = """kind => {
        const data = new DataTransfer();
        data.items.add(new File(["pasted words"], kind === "text/plain" ? "a.txt" : "b.png", { type: kind }));
        document.querySelector("#input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
    }"""
    page.evaluate(paste, "image/png")
    page.wait_for_selector("#notice:has-text('b.png was not added')")
    page.evaluate(paste, "text/plain")
    page.wait_for_selector("#files .chip")
    page.click('[aria-label="Leave out a.txt"]')
    assert page.is_hidden("#files") and page.seen.errors == []


def test_search_over_conversations(page: Any, fake: FakeServer) -> None:
    fake.answer = "Capybaras are large rodents."
    ask(page, "Animals")
    page.click("#new-chat")
    fake.answer = "Hello."
    ask(page, "Weather")
    page.fill("#search", "large RODENT")
    assert titles(page) == ["Animals"] and "large rodents" in page.inner_text(".conversation small")
    page.fill("#search", "xyz")
    assert "Nothing was found" in page.inner_text("#conversations")
    page.fill("#search", "")
    assert titles(page) == ["Weather", "Animals"]
    page.hover(".conversation >> nth=0")
    page.click('[aria-label="Rename Weather"]')
    page.keyboard.type("Sunshine")
    page.keyboard.press("Enter")
    assert titles(page) == ["Sunshine", "Animals"]


def test_answers_by_a_schema(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.fill('[name="schema"]', '{"type": ')
    assert page.inner_text("#schema-mistake").startswith("This is no JSON")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    page.fill('[name="schema"]', json.dumps(schema))
    assert page.inner_text("#schema-mistake") == ""
    fake.answer = '{"city":"Paris"}'
    answer = ask(page, "Which city?")
    assert fake.requests[0]["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert answer.locator("figure.code code").inner_text() == '{\n  "city": "Paris"\n}'


def test_tools_are_called_and_answered(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.fill(
        '[name="tools"]', '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
    )
    fake.answer, fake.calls = "", [("weather", '{"city": "Oslo"}')]
    answer = ask(page, "Rain?")
    assert fake.requests[0]["tools"][0]["function"]["name"] == "weather"
    assert answer.locator(".calls pre").inner_text() == 'weather({"city": "Oslo"})'
    fake.answer, fake.calls = "It rains.", []
    page.fill('[aria-label="Result of weather"]', "rain")
    page.click("text=Send results")
    until(page, "[...document.querySelectorAll('article.assistant .markdown')].at(-1).textContent === 'It rains.'")
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert fake.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
    ]
    assert page.locator('[aria-label="Result of weather"]').count() == 0 and page.seen.errors == []


def test_how_likely_each_word_was(page: Any, fake: FakeServer) -> None:
    page.click("#open-settings")
    page.check('[name="odds"]')
    fake.odds, fake.answer, fake.piece = True, "one two", 4
    answer = ask(page)
    assert fake.requests[0]["logprobs"] is True and fake.requests[0]["top_logprobs"] == 5
    answer.locator("text=Odds").click()
    assert answer.locator(".odd").all_inner_texts() == ["one ", "two"]
    answer.locator(".odd >> nth=0").focus()
    page.keyboard.press("ArrowRight")
    assert answer.locator(".odds-of").inner_text() == "“two” 90% · “·other” 8.2%"
    answer.locator("text=Odds").click()
    assert answer.locator(".markdown").inner_text() == "one two" and page.seen.errors == []


def test_signs_of_life_while_a_prompt_is_read(page: Any, fake: FakeServer) -> None:
    fake.comments = 25
    page.fill("#input", "A long prompt")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#live').textContent.startsWith('reading the prompt')")
    page.wait_for_selector("#stop", state="hidden")
    assert texts(page)[-1] == "Hello."


def test_a_model_that_was_put_away_is_said_to_load(page: Any, fake: FakeServer) -> None:
    fake.state = {"status": "sleeping", "phase": "", "percent": 100}
    until(page, "document.querySelector('#state').textContent === 'asleep'")
    fake.state, fake.comments = {"status": "sleeping", "phase": "weights", "percent": 100}, 60
    page.fill("#input", "Wake up")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#live').textContent.startsWith('loading the model')")
    assert page.inner_text("#state") == "loading"
    fake.state = {"status": "ready", "phase": "", "percent": 100}
    until(page, "document.querySelector('#live').textContent.startsWith('reading the prompt')")
    page.wait_for_selector("#stop", state="hidden")
    assert texts(page)[-1] == "Hello." and page.seen.errors == []


def test_an_answer_that_was_cut_goes_on(page: Any, fake: FakeServer) -> None:
    fake.finish, fake.answer = "length", "Once upon"
    answer = ask(page)
    assert "cut at the limit" in answer.locator(".note").inner_text()
    fake.finish, fake.answer = "stop", " a time."
    answer.locator(".tools >> text=Go on").click()
    until(page, "document.querySelector('article.assistant .markdown').textContent === 'Once upon a time.'")
    page.wait_for_selector("#stop", state="hidden")
    assert answer.locator(".tools >> text=Go on").is_hidden()


@pytest.mark.parametrize("prefix", ["", "/llm/chat"])
def test_it_works_under_a_path_and_with_a_key(browser: Any, prefix: str) -> None:
    fake = FakeServer(key="secret", prefix=prefix)
    page = browser.new_context().new_page()
    page.goto(fake.url + "/")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-input", "secret")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('model').textContent === 'smollm2'")
    ask(page)
    assert texts(page) == ["Hello?", "Hello."]
    wait_for(lambda: "/load" in fake.paths)
    page.context.close()
    fake.close()


def test_the_dashboards_address_opens_it(page: Any, fake: FakeServer) -> None:
    other = page.context.new_page()
    other.goto(f"{fake.url}/#dashboard")
    other.wait_for_selector("#dashboard", state="visible")
    assert other.is_hidden("#chat")
    go_to(other, fake)
