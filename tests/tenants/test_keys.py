"""What a keys file may say, what it means, and that no message repeats what stands in it."""

from datetime import UTC, datetime

import pytest

from serve_app.errors import AuthenticationError, ConfigError
from serve_app.tenants.keys import KeyRing, hash_key, new_key, parse_keys
from serve_app.tenants.tenant import ANONYMOUS, Tenant

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
A, B = hash_key("key a"), hash_key("key b")


def test_an_entry_with_everything() -> None:
    ring = parse_keys(
        f"team-a:\n  sha256: {A}\n  expires: 2027-01-01\n  models: [tiny]\n  weight: 3\n  priority: [-5, 5]\n"
        f"  prefix_group: ours\n  admin: true\nteam-b: {{sha256: {B}}}\n"
    )
    assert [tenant.name for tenant in ring.tenants] == ["team-a", "team-b"]
    tenant = ring.find("key a", NOW)
    assert tenant == Tenant(
        name="team-a",
        expires=datetime(2027, 1, 1, tzinfo=UTC),
        models=["tiny"],
        weight=3,
        priority=[-5, 5],
        prefix_group="ours",
        admin=True,
    )
    assert ring.find("key b", NOW) == Tenant(name="team-b")
    assert (tenant.may_use("tiny"), tenant.may_use("other")) == (True, False)


def test_only_the_right_key_at_the_right_time_is_found() -> None:
    ring = parse_keys(f"a: {{sha256: {A}, expires: 2026-11-23T12:00:00}}")
    assert ring.find("key a", NOW.replace(hour=11)).name == "a"
    with pytest.raises(AuthenticationError, match=r"expired at 2026-11-23 12:00 UTC"):
        ring.find("key a", NOW)
    for wrong in ("KEY A", "Key a", "key a ", "key", "", A, "\udcff"):
        with pytest.raises(AuthenticationError, match="unknown API key"):
            ring.find(wrong, NOW)


def test_only_a_valid_key_of_an_admin_is_an_admins() -> None:
    ring = parse_keys(f"a: {{sha256: {A}, admin: true, expires: 2026-11-23T12:00:00}}\nb: {{sha256: {B}}}")
    assert [ring.is_admin(key, NOW.replace(hour=11)) for key in ("key a", "key b", "key c")] == [True, False, False]
    assert not ring.is_admin("key a", NOW)


def test_keys_differ_and_begin_alike() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sk-serve-") and len(key) == 52 for key in keys)


def test_a_file_without_keys_lets_nobody_in() -> None:
    assert parse_keys("{}").tenants == parse_keys("# nobody yet\n").tenants == []


BROKEN = {
    "": "is empty",
    "  \n": "is empty",
    "- a\n- b\n": "must map names",
    "a: [\n": "is not YAML",
    "a: {sha256: s3cret-key}": "a: `sha256` must be 64 hexadecimal digits",
    "a: {weight: 2}": "a: `sha256` must be",
    "a: s3cret-key": "a: must be a mapping",
    "a/b: {}": "'a/b' is not a valid name",
    f"a: {{sha256: {A}, wait: 2}}": "a: unknown field `wait` \\(known: sha256, expires, models, weight",
    f"a: {{sha256: {A}, weight: 0}}": "a: `weight`: Input should be greater than or equal to 1",
    f"a: {{sha256: {A}, weight: s3cret-key}}": "a: `weight`: Input should be a valid integer",
    f"a: {{sha256: {A}, priority: [5, 1]}}": "a: Value error, priority: the lowest number must come first",
    f"a: {{sha256: {A}, priority: [5]}}": "a: `priority`: List should have at least 2",
    f"a: {{sha256: {A}, models: []}}": "a: `models`: List should have at least 1",
    f"a: {{sha256: {A}, expires: soon}}": "a: `expires`: ",
    f"a: {{sha256: {A}, name: b}}": "a: unknown field `name`",
    f"a: {{sha256: {A}}}\nb: {{sha256: {A}}}": "b: same key as a",
    f"a: {{sha256: {A}}}\na: {{sha256: {B}}}": "is not YAML: a name is given twice, line 1",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items())
def test_a_broken_file_is_refused_in_one_line_without_its_values(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        parse_keys(text)
    assert "\n" not in str(refusal.value)
    assert "s3cret" not in str(refusal.value)
    assert A not in str(refusal.value)


def test_salts_of_the_prefix_cache_meet_within_a_group_alone() -> None:
    tenants = [
        ANONYMOUS,
        Tenant(name="a"),
        Tenant(name="b"),
        Tenant(name="c", prefix_group="a"),
        Tenant(name="d", prefix_group="b"),
        Tenant(name="e", prefix_group="b"),
    ]
    given = ["", "x", "\0key a\0", "\0group a\0x", "\0anonymous\0x", "\0"]
    salts = [{tenant.cache_salt(text) for text in given} for tenant in tenants]
    assert all(len(own) == len(given) for own in salts), "a client's own salts stay apart"
    shared = [(i, j) for i in range(6) for j in range(i) if salts[i] & salts[j]]
    assert shared == [(5, 4)]
    assert [ANONYMOUS.cache_salt(salt) for salt in ("", "x")] == ["", "x"], "as for a server without keys"


def test_a_ring_is_what_it_was_made_of() -> None:
    tenants = {A: Tenant(name="a")}
    ring = KeyRing(tenants)
    tenants.clear()
    assert [tenant.name for tenant in ring.tenants] == ["a"]
