"""Conversations that a browser keeps: over reloads and tabs, renamed, deleted, exported, imported,
and too many."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page, expect

from tests.console.conftest import ConsoleServer, Engines, watched_page
from tests.console.steps import answered, ask, set_fields, settle, wait_text

ID = "0123456789abcdef01234567"


def talk(page: Page, text: str) -> None:
    page.get_by_role("button", name="New chat").click()
    ask(page, text)
    answered(page)


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .conversation").all_inner_texts()


def export(page: Page, path: Path) -> dict[str, Any]:
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export all").click()
    saved.value.save_as(path)
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def by_id(file: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(file["conversations"], key=lambda conversation: str(conversation["id"]))


def test_conversations_are_listed_renamed_and_deleted(page: Page, service: Engines) -> None:
    settle(page)
    assert titles(page) == []
    for question in ("First question", "Second question", "Third\nwith more lines"):
        talk(page, question)
    assert titles(page) == ["Third", "Second question", "First question"]
    page.get_by_role("button", name="Second question", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("Second question")
    page.get_by_role("button", name="Rename Second question").click()
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Renamed")
    page.get_by_role("button", name="Delete First question").click()
    expect(page.locator("#conversations li")).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations li")).to_have_count(3)
    page.get_by_role("button", name="Delete Renamed").click()
    expect(page.locator("#title")).to_have_text("New chat")
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(2)
    assert titles(page) == ["Third", "First question"]


def test_a_reload_keeps_the_conversation_and_its_settings(page: Page, service: Engines) -> None:
    settle(page)
    set_fields(page, temperature="0.25", system="Be kind.")
    ask(page, "Stay?")
    answered(page)
    page.reload()
    assert answered(page).startswith("Paris")
    assert page.locator("#setting-temperature").input_value() == "0.25"
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#setting-system").input_value() == "Be kind.", "a new one begins with the same"
    set_fields(page, system="")
    page.get_by_role("button", name="Stay?", exact=True).click()
    assert page.locator("#setting-system").input_value() == "Be kind."


@pytest.mark.usefixtures("slow")
def test_a_reload_in_the_middle_of_an_answer_keeps_what_had_come(page: Page, says: list[str]) -> None:
    settle(page)
    ask(page, "Stay?")
    wait_text(page, ".assistant .markdown", "(Paris.*){20}")
    page.reload()
    wait_text(page, ".assistant .markdown", "^Paris")
    wait_text(page, ".assistant .hint", "This answer was interrupted.")


@pytest.mark.usefixtures("slow")
def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page, says: list[str]) -> None:
    settle(page)
    ask(page, "Go on")
    before = wait_text(page, ".assistant .markdown", "Paris")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#halt")).to_be_visible()
    page.get_by_role("button", name="Go on", exact=True).click()
    wait_text(page, ".assistant .markdown", f"^{before.strip()}.+Paris")
    page.get_by_role("button", name="Stop").click()
    wait_text(page, ".assistant .hint", "Stopped.")


def test_other_tabs_see_what_changes(page: Page, service: Engines, console: ConsoleServer) -> None:
    settle(page)
    other = page.context.new_page()
    other.goto(console.url)
    settle(other)
    talk(page, "From here")
    expect(other.locator("#conversations li")).to_have_text("From here")
    other.get_by_role("button", name="From here", exact=True).click()
    ask(other, "From there")
    answered(other, 2)
    expect(page.locator(".user .text").last).to_have_text("From there")
    answered(page, 2)


def test_export_and_import_bring_everything_back(
    page: Page, browser: Browser, console: ConsoleServer, service: Engines, tmp_path: Path
) -> None:
    settle(page)
    set_fields(page, system="Be kind.")
    talk(page, "One?")
    service.answer = "<think>\nHm.\n</think>\n\nAnother answer."
    page.get_by_role("button", name="Ask again").click()
    answered(page)
    talk(page, "Two?")
    path = tmp_path / "kept.json"
    file = export(page, path)
    assert (file["format"], file["version"], len(file["conversations"])) == ("serve_app conversations", 1, 2)
    with watched_page(browser, console) as fresh:
        settle(fresh)
        fresh.set_input_files("#import-file", path)
        wait_text(fresh, "#toast", "^2 imported.$")
        assert by_id(export(fresh, tmp_path / "again.json")) == by_id(file)
        fresh.get_by_role("button", name="One?", exact=True).click()
        assert answered(fresh) == "Another answer."
        expect(fresh.locator(".branch")).to_have_text("2/2")
        expect(fresh.locator("#setting-system")).to_have_value("Be kind.")
        fresh.set_input_files("#import-file", path)
        wait_text(fresh, "#toast", "^0 imported, 2 here already.$")
        fresh.reload()
        expect(fresh.locator("#conversations li")).to_have_count(2)


def message(**fields: Any) -> dict[str, Any]:
    return {"id": ID, "parent": None, "role": "user", "content": "x", **fields}


def conversation(**fields: Any) -> dict[str, Any]:
    whole = {"id": "a", "title": "t", "created": 1, "updated": 1, "settings": {}, "messages": {ID: message()}}
    return {**whole, "chosen": {"root": ID}, **fields}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("{", "this is not a JSON file"),
        ({"format": "other"}, "not a file of exported conversations"),
        ({"version": 2}, "version 2 of the file is not known here"),
        ({"conversations": {}}, "`conversations` must be a list"),
        (conversation(title=1), "`conversations[0].title` must be a text"),
        (conversation(updated="x"), "`conversations[0].updated` must be a number"),
        (conversation(messages={ID: message(role="system")}), "role` must be one of user"),
        (conversation(messages={ID: message(parent=ID)}), "parent` must be a message before it"),
        (conversation(messages={ID: message(parent="b")}), "parent` must be a message before it"),
        (conversation(messages={"__proto__": message()}), "24 hexadecimal digits"),
        (conversation(messages={ID: message(content=None)}), "content` must be a text"),
        (conversation(messages={ID: message(role="assistant", figures={"pace": "<b>"})}), "pace` must be a number"),
        (
            conversation(messages={ID: message(role="assistant", toolCalls=[{"id": 1}])}),
            "toolCalls[0].id` must be a text",
        ),
        (conversation(chosen={"root": "nobody"}), "chosen.root` must be one of its children"),
        (conversation(settings={"temperature": 1}), "settings.temperature` must be a text"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused_by_name(page: Page, tmp_path: Path, wrong: Any, reason: str) -> None:
    file: Any = {"format": "serve_app conversations", "version": 1, "conversations": []}
    if isinstance(wrong, dict):
        file = {**file, "conversations": [wrong]} if "messages" in wrong else {**file, **wrong}
    path = tmp_path / "wrong.json"
    path.write_text(wrong if isinstance(wrong, str) else json.dumps(file))
    settle(page)
    page.set_input_files("#import-file", path)
    expect(page.locator("#toast")).to_contain_text(reason)
    assert "Not imported" in page.locator("#toast").inner_text()
    assert titles(page) == []


def test_what_is_unknown_in_a_file_is_left_out(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "more.json"
    one = conversation(more=1, settings={"more": "x", "temperature": "1"}, messages={ID: message(more=1, model="x")})
    path.write_text(json.dumps({"format": "serve_app conversations", "version": 1, "conversations": [one]}))
    settle(page)
    page.set_input_files("#import-file", path)
    wait_text(page, "#toast", "^1 imported.$")
    [read] = export(page, tmp_path / "again.json")["conversations"]
    assert read == conversation(settings={"temperature": "1"})


def test_a_full_storage_is_said(page: Page, console: ConsoleServer, service: Engines) -> None:
    settle(page)
    session = page.context.new_cdp_session(page)
    session.send("Storage.overrideQuotaForOrigin", {"origin": console.url, "quotaSize": 1})
    ask(page, "Hello " * 2000)
    assert answered(page).startswith("Paris")
    assert "storage is full" in wait_text(page, "#notice", ".")
    session.send("Storage.overrideQuotaForOrigin", {"origin": console.url})
    ask(page, "Again")
    answered(page, 2)
    expect(page.locator("#notice")).to_have_text("")
