"""What people do on the console's page, and what they wait for."""

import re

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, expect

TIMEOUT_MS = 60_000


def settle(page: Page) -> None:
    """Wait until the page knows the model."""
    page.locator("#model option").wait_for(state="attached", timeout=TIMEOUT_MS)


def set_fields(page: Page, **values: str) -> None:
    """Fill in settings, in the dialog that people use."""
    page.click("#settings-toggle")
    page.evaluate("document.querySelectorAll('#settings-groups details').forEach((group) => (group.open = true))")
    for name, value in values.items():
        field = page.locator(f"#setting-{name}")
        if field.evaluate("(field) => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.get_by_role("button", name="Done").click()


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, number: int = 1) -> str:
    """The text of the last answer, once so many stand there complete and rendered."""
    tools = page.locator(".assistant > .tools:visible")
    expect(tools).to_have_count(number, timeout=TIMEOUT_MS)
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".markdown[aria-busy=true]")).to_have_count(0, timeout=TIMEOUT_MS)
    return page.locator(".assistant .markdown").last.inner_text()


def wait_text(page: Page, selector: str, pattern: str) -> str:
    """The text of the first such element, once it matches."""
    found = page.locator(selector).first
    expect(found).to_have_text(re.compile(pattern), timeout=TIMEOUT_MS)
    return found.text_content() or ""
