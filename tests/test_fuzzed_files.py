"""Files that operators edit or models bring: whatever they contain, the readers return a value or a
typed error."""

import datetime
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
import yaml
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tests.quiet_ray  # noqa: F401 (Ray Serve keeps the environment that it is first imported in)
from load_tests.random_gguf import write_gguf
from serve_app.checkpoints.gguf_header import GgufHeader
from serve_app.checkpoints.model_files import check_model, locate_model
from serve_app.errors import ServeAppError
from serve_app.launch.config_file import read_config
from serve_app.launch.config_source import ConfigSource
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.pooling import read_pooling
from serve_app.model.sources.gguf_file import open_gguf
from serve_app.model.sources.safetensors_files import open_safetensors
from serve_app.tenants.day_file import ledger_file
from serve_app.tenants.key_file import WatchedKeyFile, add_key, read_key_file, remove_key
from serve_app.tenants.ledger import Ledger, Spent, read_ledger
from serve_app.text.tokenizer import load_tokenizer
from tests.cli.conftest import tiny_folder
from tests.examples import examples
from tests.models import own_cache

__all__ = ["tiny_folder"]

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=UTC)
REPOSITORY = Path(__file__).parents[1]
# What parsers have failed of, here and elsewhere.
HOSTILE = [
    b"\xff\xfe",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xe9",
    b"2027-02-30",
    b"2026-13-45 99:99:99",
    b"0001-01-01T00:00:00+23:59",
    b"9" * 5000,
    b"0x" + b"f" * 5000,
    b"1" + b":59" * 3000,
    b"-.inf",
    b"1e999",
    b"[" * 3000,
    b"{a: " * 1500,
    b"- " * 3000,
    b"&a [*a]",
    b"*nobody",
    b"<<: 3\n",
    b"? [a, b]\n: c\n",
    b"!!python/object:os.system {}",
    b"!!timestamp x",
    b"!!binary x",
    b"!!int ''",
    b"!!float ''",
    b"%YAML 9.9\n---\n",
    b"---\na: 1\n---\nb: 2\n",
    b"\t",
    b"x" * 300,
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"~/",
    b"~no-such-user/",
    b"\n",
    b" ",
    b"null",
    b"true",
    b"-1",
    b"9007199254740992",
    b"18446744073709551615",
    b"[]",
    b"{}",
]
BOMB = b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (name, name, b", ".join([b"*%c" % (name - 1)] * 10)) for name in range(ord("b"), ord("m"))
)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Any bytes; or `valid`, with pieces taken out or replaced, cut off, or in another encoding."""
    kind = draw(st.sampled_from(["edited", "edited", "edited", "cut", "encoded", "any"]))
    if kind == "any":
        return draw(st.binary(max_size=200) | st.sampled_from([*HOSTILE, BOMB, b""]))
    if kind == "cut":
        return valid[: draw(st.integers(0, len(valid)))]
    if kind == "encoded":
        return valid.decode("latin-1").encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-7", "latin-1"])))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(valid)))
        piece = draw(st.sampled_from(HOSTILE) | st.binary(max_size=8))
        valid = valid[:at] + piece + valid[at + draw(st.integers(0, 12)) :]
    return valid


def fuzz(num_examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples(num_examples),
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.large_base_example,
        ],
    )


def typed(read: Callable[[], object]) -> object:
    """What it returns, or None for one of our own errors, whose message is one line that can be
    written anywhere."""
    told = ""
    try:
        return read()
    except ServeAppError as error:
        told = str(error)
    assert 0 < len(told) < 3000
    assert "\n" not in told
    return None


CONFIG = (REPOSITORY / "deploy" / "config.yaml").read_bytes()


@fuzz(150)
@given(content=damaged(CONFIG))
@example(content=BOMB)
@example(content=b"applications:\n- {name: a, import_path: 'serve_app.app:build', args: {model: /" + b"x" * 300 + b"}}")
@example(content=b"applications:\n- {name: a, import_path: 'serve_app.app:build', args: {model: '~nobody/x'}}")
@example(
    content=b"http_options: {host: '"
    + b"h" * 3000
    + b"'}\napplications:\n- {name: a, import_path: 'serve_app.app:build'}"
)
@example(content=b"http_options: {port: 99999999999, host: 'a\xc3\xa9.\xc3\xa9'}\napplications: []")
def test_config_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    typed(lambda: read_config(ConfigSource(file=path), tmp_path))


KEYS = yaml.safe_dump(
    {
        "a": {"sha256": "ab" * 32, "expires": NOW, "models": ["tiny"], "weight": 2, "priority": [0, 9]},
        "b": {"sha256": "cd" * 32, "tokens_per_day": 5, "prefix_group": "g", "admin": True, "expires": NOW.date()},
    }
).encode()


@fuzz(120)
@given(content=damaged(KEYS))
@example(content=BOMB)
@example(content=BOMB + b"? *l\n: 1\n")
def test_keys_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(KEYS)
    watched = WatchedKeyFile(path)
    path.write_bytes(content)
    ring = typed(lambda: read_key_file(path))
    watched.refresh()
    assert (watched.error is None) == (ring is not None)
    names = [tenant.name for tenant in watched.ring.tenants]
    assert ring is not None or names == ["a", "b"]
    typed(lambda: [watched.ring.find(key, NOW) for key in ("x", "\udc80")])
    path.write_bytes(content)
    typed(lambda: add_key(path, "new", {}))
    typed(lambda: remove_key(path, "a"))
    path.write_bytes(KEYS)
    watched.refresh()
    assert [tenant.name for tenant in watched.ring.tenants] == ["a", "b"], "a mended file is read"


SPENT = Spent("a", "tiny", "fp", "req-1", "chat", "completed", 10, 4, 7, 5, 0.1)


LINES = (
    b'{"time":"2026-11-23T12:00:00.000+00:00","key":"a","model":"tiny","revision":"fp","request_id":"r","endpoint":'
    b'"chat","outcome":"completed","prompt_tokens":10,"cached_tokens":4,"output_tokens":7,"reasoning_tokens":5,'
    b'"seconds":0.1}\n'
) * 2


@fuzz(200)
@given(content=damaged(LINES))
@example(content=LINES.replace(b":10,", b":18446744073709551615,") * 2)
@example(content=LINES.replace(b":10,", b":9007199254740991,") * 3)
@example(content=LINES[:-1])
def test_ledgers(tmp_path: Path, content: bytes) -> None:
    file = ledger_file(tmp_path, NOW.date())
    file.write_bytes(content)
    ledger = Ledger(tmp_path, NOW.timestamp)
    before = ledger.today("a").requests
    ledger.write(SPENT)
    ledger.look()
    assert ledger.today("a").requests == before + 1
    assert sum(entry.get("requests", 1) for _, entry in read_ledger(tmp_path, NOW.date(), NOW.date())) >= before + 1
    file.write_bytes(content)  # by somebody else, while it is open
    ledger.look()
    ledger.write(SPENT)
    assert ledger.today("a").requests == before + 2
    ledger.close()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = {
        "model_type": "llama",
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0},
        "tie_word_embeddings": False,
    }
    return write_gguf(path, config, lambda name, layer, num_layers: Kind.F32)


def header_of(path: Path) -> bytes:
    return path.read_bytes()[: min(tensor.data_offset for tensor in GgufHeader(path).tensors)]


@fuzz(80)
@given(data=st.data())
def test_gguf_headers(tmp_path: Path, gguf: Path, data: st.DataObject) -> None:
    header, content = header_of(gguf), gguf.read_bytes()
    kind = data.draw(st.sampled_from(["bits", "bits", "numbers", "any"]))
    if kind == "any":
        changed = data.draw(damaged(header))
    else:
        piece = {"bits": st.binary(min_size=1, max_size=4), "numbers": st.sampled_from([b"\xff" * 8, b"\0" * 8])}[kind]
        near_an_end = st.integers(0, 800) | st.integers(len(header) - 800, len(header) - 8)
        at, new = data.draw(near_an_end | st.integers(0, len(header) - 8)), data.draw(piece)
        changed = header[:at] + new + header[at + len(new) :]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(changed + content[len(header) :])
    typed(lambda: GgufHeader(path))
    cache = tmp_path / "cache"
    with suppress(UnsupportedModelError):
        typed(lambda: open_gguf(path, cache))
    typed(lambda: load_tokenizer(str(path), None))
    shutil.rmtree(cache, ignore_errors=True)


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]


def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_folder, folder)
    return folder


@pytest.mark.parametrize("name", [*FILES, "modules.json", "model.safetensors.index.json"])
@fuzz(40)
@given(data=st.data())
def test_model_folders(tmp_path: Path, tiny_folder: Path, name: str, data: st.DataObject) -> None:
    folder = copied(tiny_folder, tmp_path)
    path = folder / name
    valid = path.read_bytes() if path.exists() else b'{"weight_map": {"a": "model.safetensors"}}'
    head, rest = (valid[:2000], valid[2000:]) if name.endswith(".safetensors") else (valid, b"")
    path.write_bytes(data.draw(damaged(head)) + rest)
    files = typed(lambda: locate_model(str(folder)))
    typed(lambda: check_model(files, 64))  # type: ignore[arg-type]
    typed(lambda: read_pooling(files))  # type: ignore[arg-type]
    typed(lambda: load_tokenizer(str(folder)))
    with suppress(UnsupportedModelError):
        typed(lambda: open_safetensors(folder))


# No large numbers: a layer of that width would be made.
VALUES = st.sampled_from([None, True, -1, 0, 1, 0.5, "x", "", [], {}, [0], {"x": 0}, float("nan"), "\udc80", [[[]]]])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@fuzz(30)
@given(data=st.data())
def test_values_of_a_models_configuration(tmp_path: Path, tiny_folder: Path, name: str, data: st.DataObject) -> None:
    folder = copied(tiny_folder, tmp_path)
    path = folder / name
    content = json.loads(path.read_text())
    holder = content
    while True:
        key = data.draw(st.sampled_from(sorted(holder)[:40])) if isinstance(holder, dict) else 0
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        holder = inner
    holder[key] = data.draw(VALUES)
    path.write_text(json.dumps(content))
    typed(lambda: check_model(locate_model(str(folder)), 64))
    if name.startswith("tokenizer"):
        typed(lambda: load_tokenizer(str(folder)).check_fits(99))
    else:
        typed(lambda: load_model(ModelOptions(model=str(folder), device="cpu", cache_dir=own_cache(folder))))


@fuzz(200)
@given(
    model=st.text(max_size=300) | st.sampled_from(["a" * 400, "~nobody/x", "/" + "b" * 300 + ".gguf", "\0", "\udc80"])
)
def test_names_of_models(model: str) -> None:
    typed(lambda: locate_model(model))
