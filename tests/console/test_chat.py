"""The chat in a real browser: real streaming, real engines, branches, tools, keys, and what a
hostile model says."""

import json
import re

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page, expect

from serve_app.core.sampling_params import SamplingParams
from tests.console.conftest import ConsoleServer, Engines, watched_page
from tests.console.steps import TIMEOUT_MS, answered, ask, set_fields, settle, wait_text

MARKDOWN = """\
## Two ways

Take the **smaller** head, see [the manual](https://docs.example.org/merge?a=1&b=2).

```python
def merge(a, b):
    return sorted(a + b)
```

| way | time |
|:----|-----:|
| sorted | `n log n` |

1. one

2. two
"""
HOSTILE = """\
<img src=x onerror="document.title='broken'"> <script>document.title='broken'</script>

<iframe src="https://evil.example/"></iframe>
<style>body { display: none }</style>

![picture](https://evil.example/spy.png) ![own](/metrics) [a](javascript:alert(1)) [b](&#106;avascript:alert(1))
[c](data:text/html,<script>alert(1)</script>) [d](//evil.example) [e](/debug/timeline) <javascript:alert(1)>
[f](https://evil.example/" onmouseover="alert(1)) [g](https://good.example/ "x\\" onclick=\\"alert(1)")

```"><img/src=x/onerror=alert(1)>
</code></pre><script>document.title='broken'</script>
```

| <b>x</b> |
|---|
| <svg onload=alert(1)> |

The end.
"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def messages(service: Engines) -> str:
    """The last request's prompt, as text."""
    return service.tokenizer.decode(service.requests[-1].prompt_token_ids)


@pytest.mark.usefixtures("slow")
def test_an_answer_streams_and_its_figures_are_folded_away(page: Page, service: Engines) -> None:
    service.answer = "Paris is the capital of France. " * 8
    settle(page)
    ask(page, "What is the capital of France?")
    wait_text(page, ".assistant .markdown", "^Paris")
    assert page.input_value("#prompt") == ""
    assert answered(page).startswith("Paris is the capital of France.")
    figures = page.locator(".answer-figures")
    expect(figures.locator("dl")).to_be_hidden()
    figures.get_by_text("Figures").click()
    told = figures.locator("dl").inner_text()
    assert re.search(
        r"first token\s+[\d.]+ s\s+pace\s+[\d.]+ tokens/s\s+answer\s+\d+ tokens\s+prompt\s+\d+ tokens", told
    )
    assert re.search(r"ended by\s+stop\s+model\s+babbler\s+request\s+req-", told)
    ask(page, "And of Italy?")
    answered(page, 2)
    asked = messages(service)
    assert asked.index("What is the capital") < asked.index("Paris is the capital") < asked.index("And of Italy?")


def test_markdown_is_rendered_and_code_is_copied(page: Page, service: Engines) -> None:
    service.answer = MARKDOWN
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settle(page)
    ask(page, "How do I merge?")
    answered(page)
    text = page.locator(".markdown")
    expect(text.get_by_role("heading", name="Two ways")).to_be_visible()
    link = text.get_by_role("link")
    assert link.get_attribute("href") == "https://docs.example.org/merge?a=1&b=2"
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer nofollow")
    assert text.locator("td").all_inner_texts() == ["sorted", "n log n"]
    assert text.locator("ol li").all_inner_texts() == ["one", "two"]
    assert text.locator("ol").count() == 1, "blocks that belong together are one"
    expect(text.locator(".code-bar span")).to_have_text("python")
    colour = "(element) => getComputedStyle(element).color"
    keyword, plain = text.locator(".t-k").first.evaluate(colour), text.locator("pre").evaluate(colour)
    assert keyword != plain
    text.get_by_role("button", name="Copy the code").click()
    wait_text(page, "#toast", "Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "def merge(a, b):\n    return sorted(a + b)\n"
    page.get_by_role("button", name="Copy the answer").click()
    while not page.evaluate("navigator.clipboard.readText()").startswith("## Two ways"):
        page.wait_for_timeout(20)


def test_a_hostile_model_achieves_nothing(page: Page, service: Engines) -> None:
    """The page's fixture also fails for any request to elsewhere, any dialog and any complaint of
    the browser."""
    service.answer = HOSTILE
    settle(page)
    ask(page, "<b>bold</b><img src=x onerror=alert(1)>")
    assert "The end." in answered(page)
    assert page.locator(".user .text").inner_text() == "<b>bold</b><img src=x onerror=alert(1)>"
    assert page.locator("#messages :is(img, script, iframe, style, b, svg:not(.icon))").count() == 0
    links = page.locator("#messages a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
    assert links, "what is harmless stays a link"
    assert all(href.startswith("https://") for href in links), links
    names = page.locator("#messages .markdown *").evaluate_all("(all) => all.flatMap((one) => one.getAttributeNames())")
    assert not {name for name in names if name.startswith("on") or name in ("style", "src", "id", "srcdoc")}
    assert page.title() == "serve_app"
    page.reload()
    assert "The end." in answered(page)
    assert page.title() == "serve_app"


def test_what_is_selected_stays_selected_while_the_answer_grows(page: Page, service: Engines, slow: None) -> None:
    service.answer = "First paragraph.\n\n" + "Another one, which is longer.\n\n" * 30
    settle(page)
    ask(page, "Tell me")
    expect(page.locator(".markdown p").nth(6)).to_be_visible(timeout=TIMEOUT_MS)
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.markdown p'))")
    assert answered(page).count("Another") == 30
    assert page.evaluate("getSelection().toString()").strip() == "First paragraph."


@pytest.mark.usefixtures("slow")
def test_stop_frees_the_slot_and_keeps_what_was_said(page: Page, console: ConsoleServer, says: list[str]) -> None:
    settle(page)
    ask(page, "Go on for long.")
    wait_text(page, ".assistant .markdown", "Paris")
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "true")
    page.press("#prompt", "Escape")
    wait_text(page, ".assistant .hint", "Stopped.")
    expect(page.locator("#send")).to_be_visible()
    while console.busy():  # the test's time limit ends a leak
        page.wait_for_timeout(20)
    page.reload()
    wait_text(page, ".assistant .markdown", "Paris")


def test_edits_and_second_answers_are_branches(page: Page, service: Engines) -> None:
    settle(page)
    ask(page, "One?")
    answered(page)
    ask(page, "Then?")
    answered(page, 2)
    service.answer = "Second answer."
    page.get_by_role("button", name="Ask again").first.click()
    assert answered(page, 1) == "Second answer."
    assert "Then?" not in messages(service)
    expect(page.locator(".branch")).to_have_text("2/2")
    page.get_by_role("button", name="Earlier variant").click()
    expect(page.locator(".user")).to_have_count(2)
    assert answered(page, 2).startswith("Paris")
    page.get_by_role("button", name="Later variant").click()
    assert answered(page, 1) == "Second answer."

    service.answer = "An answer to two."
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edited message").fill("Two?")
    page.keyboard.press("Enter")
    assert answered(page) == "An answer to two."
    expect(page.locator(".user .branch")).to_have_text("2/2")
    page.reload()
    assert answered(page) == "An answer to two."
    page.get_by_role("button", name="Earlier variant").click()
    expect(page.locator(".user .text")).to_have_text("One?")
    expect(page.locator(".assistant .branch")).to_have_text("2/2")


def test_several_answers_at_once_are_variants(page: Page, service: Engines) -> None:
    settle(page)
    set_fields(page, n="3")
    ask(page, "One?")
    assert answered(page).startswith("Paris")
    expect(page.locator(".branch")).to_have_text("1/3")
    for _ in range(2):
        page.get_by_role("button", name="Later variant").click()
        assert answered(page).startswith("Paris")
    expect(page.locator(".branch")).to_have_text("3/3")


def test_calls_and_reasoning_are_folded_and_results_are_sent(page: Page, service: Engines) -> None:
    service.answer = f"<think>\nI have to ask.\n</think>\n\n{CALL}"
    settle(page)
    set_fields(page, tools=json.dumps([WEATHER]), enable_thinking="true")
    ask(page, "How is it in Rome?")
    answered(page)
    call, reasoning = page.locator(".call"), page.locator(".reasoning")
    for folded, name in ((call, "Calls weather"), (reasoning, "Reasoning")):
        expect(folded.locator("pre")).to_be_hidden()
        folded.get_by_text(name, exact=True).click()
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Rome"}
    assert reasoning.locator("pre").inner_text().strip() == "I have to ask."
    service.answer = "It is **sunny**."
    page.get_by_role("textbox", name="Result of weather").fill('{"sky": "blue"}')
    page.get_by_role("button", name="Send results").click()
    assert answered(page, 2) == "It is sunny."
    assert '{"sky": "blue"}' in messages(service)
    assert "<tool_call>" in messages(service)
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    page.get_by_text("weather answered").click()
    expect(page.locator(".tool pre")).to_contain_text("blue")


def test_an_answer_by_a_json_schema(page: Page, service: Engines) -> None:
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    settle(page)
    set_fields(page, format="json_schema", schema="{")
    ask(page, "Where?")
    note = wait_text(page, "#settings-note", "JSON")
    assert "JSON schema: is not JSON" in note
    expect(page.locator("#setting-schema")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#setting-schema")).to_be_focused()
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "Where?"
    service.answer = '{"city": "Rome"}'
    set_fields(page, schema=json.dumps(schema))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#prompt", "Enter")
    assert asked.value.post_data_json["response_format"]["json_schema"]["schema"] == schema
    assert json.loads(answered(page).removeprefix("json")) == {"city": "Rome"}
    assert page.locator(".code .t-nt").count() == 1


def test_every_sampling_parameter_has_its_field(page: Page, service: Engines) -> None:
    settle(page)
    names = [*SamplingParams.client_fields(), "max_tokens", "seed", "stop", "bad_words"]
    for name in names:
        assert page.locator(f"#setting-{name}").count() == 1, name
    values = {
        "temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "repetition_penalty": "1.1",
        "presence_penalty": "0.2", "frequency_penalty": "0.3", "seed": "7", "max_tokens": "20", "min_tokens": "1",
        "ignore_eos": "true", "stop": "one\ntwo", "stop_token_ids": "3, 4", "logit_bias": '{"42": -100}',
        "bad_words": "never", "priority": "1", "cache_salt": "x", "system": "Be short.",
    }  # fmt: skip
    set_fields(page, **values)
    ask(page, "Hello")
    answered(page)
    params = service.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert (*penalties, params.seed, params.min_tokens) == (1.1, 0.2, 0.3, 7, 1)
    assert (set(params.stop_token_ids) >= {3, 4}, params.logit_bias) == (True, ((42, -100.0),))
    assert params.bad_words
    assert "Be short." in messages(service)


def test_a_refusal_is_shown_in_the_servers_words(page: Page, service: Engines) -> None:
    settle(page)
    set_fields(page, temperature="9")
    with page.expect_response("**/v1/chat/completions") as answer:
        ask(page, "Hello")
    assert answer.value.status == 400
    assert "temperature" in wait_text(page, ".assistant .error", ".")
    set_fields(page, temperature="0")
    page.get_by_role("button", name="Ask again").click()
    assert answered(page).startswith("Paris")


def test_a_server_with_keys_asks_for_one(browser: Browser, keyed: ConsoleServer) -> None:
    keyed.service.answer = "Hello **you**."
    with watched_page(browser, keyed) as page:
        wait_text(page, "#settings-note", "wants an API key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        wait_text(page, "#settings-note", "does not know this API key")
        page.get_by_label("API key").fill("team-key")
        page.keyboard.press("Tab")
        settle(page)
        page.get_by_role("button", name="Done").click()
        ask(page, "Hello")
        assert answered(page) == "Hello you."
        page.keyboard.press("F2")
        wait_text(page, "#live .panel-note", "needs an admin's API key")
        page.click("#settings-toggle")
        page.get_by_label("API key").fill("admin-key")
        page.get_by_label("Keep it in this browser").check()
        page.get_by_role("button", name="Done").click()
        expect(page.locator("#live .replica").first).to_be_visible(timeout=TIMEOUT_MS)
        again = page.context.new_page()  # another tab knows what the browser keeps
        again.goto(keyed.url)
        settle(again)
        assert "admin-key" not in json.dumps(again.evaluate("indexedDB.databases()"))


def test_the_chat_is_used_by_keyboard_alone(page: Page, service: Engines) -> None:
    settle(page)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("One?\n")
    answered(page)
    expect(page.locator("#chat-status")).to_have_text("The answer is complete.")
    page.keyboard.press("Shift+Tab")
    reached: list[str] = []
    for _ in range(12):
        reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()"))
        page.keyboard.press("Shift+Tab")
    wanted = ["Figures", "Ask again", "Copy the answer", "Edit the message", "Copy the message", "Conversation"]
    assert [name for name in reached if name in wanted] == wanted


def test_everything_has_a_role_and_a_name(page: Page, service: Engines) -> None:
    settle(page)
    ask(page, "One?")
    answered(page)
    page.keyboard.press("F2")
    page.keyboard.press("F4")
    nameless = """() => [...document.querySelectorAll(
            "input, select, textarea, button, canvas, section, dialog, aside")]
        .filter((element) => element.checkVisibility())
        .filter((element) => !(element.labels?.length || element.textContent.trim()
            || element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")))
        .map((element) => element.outerHTML)"""
    assert page.evaluate(nameless) == []
    for role, name in (
        ("complementary", "Conversations"), ("log", "Conversation"), ("article", "You"), ("article", "babbler"),
        ("region", "Chat"), ("region", "Live batch"), ("region", "Timeline"), ("textbox", "Message"),
    ):  # fmt: skip
        expect(page.get_by_role(role, name=name, exact=True)).to_have_count(1)  # type: ignore[arg-type]
    page.click("#settings-toggle")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    assert page.evaluate(nameless) == []
