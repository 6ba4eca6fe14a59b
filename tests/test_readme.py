"""The README and the changelog say what the code says."""

import re
from pathlib import Path

import serve_app
from serve_app.settings import setting_rows

ROOT = Path(__file__).parent.parent


def test_table_of_settings_is_the_tree_of_settings() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("<!-- settings:begin -->\n")[2].partition("<!-- settings:end -->")[0]
    expected = "| key | default | meaning |\n|---|---|---|\n"
    expected += "".join(f"| `{key}` | `{default}` | {meaning} |\n" for key, default, meaning in setting_rows())
    assert table == expected


def test_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first.group(1) == serve_app.__version__
