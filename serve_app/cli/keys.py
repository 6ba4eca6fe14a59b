"""`serve-app keys`: make, list and revoke the API keys of a keys file. A server that watches it
follows within 2 s."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from serve_app.errors import ConfigError
from serve_app.tenants.key_file import add_key, read_key_file, remove_key

keys = typer.Typer(help="API keys: make, list, revoke.", no_args_is_help=True)

KeysFile = Annotated[Path, typer.Option("--file", help="The keys file, `ingress.keys_file` of the server.")]
_DEFAULT_FILE = Path("keys.yaml")


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the key, as in logs and the ledger.")],
    file: KeysFile = _DEFAULT_FILE,
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The key is refused from this day on (UTC).")
    ] = None,
    weight: Annotated[int | None, typer.Option(help="Share of the queue, relative to other keys; default 1.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests within 60 seconds.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and outputs within 60 seconds.")
    ] = None,
    tokens_per_day: Annotated[int | None, typer.Option(help="Tokens within a UTC day.")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Prompts times `n` at once.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model that it may use; repeatable; default: all.")] = None,
    prefix_group: Annotated[str | None, typer.Option(help="Keys of one group share cached prefixes.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May use /metrics and /debug.")] = False,
) -> None:
    """Create a key, add its hash to the file, and print the key, which is not stored anywhere."""
    fields = {
        "expires": None if expires is None else expires.date(),
        "weight": weight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "max_sequences": max_sequences,
        "models": model or None,
        "prefix_group": prefix_group,
        "admin": admin or None,
    }
    given = {field: value for field, value in fields.items() if value is not None}
    typer.echo(_or_exit(lambda: add_key(file, name, given)))


@keys.command("list")
def list_keys(file: KeysFile = _DEFAULT_FILE) -> None:
    """List the keys in the file, one line each. The keys themselves are not stored."""
    for tenant in _or_exit(lambda: read_key_file(file)).tenants:
        fields = tenant.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        expired = tenant.expires is not None and tenant.expires <= datetime.now(UTC)
        words = [tenant.name, *(f"{field}={_shown(value)}" for field, value in fields.items()), *["EXPIRED"] * expired]
        typer.echo("  ".join(words))


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    file: KeysFile = _DEFAULT_FILE,
) -> None:
    """Remove a key from the file. Running streams continue; new requests are refused."""
    _or_exit(lambda: remove_key(file, name))


T = TypeVar("T")


def _or_exit(work: Callable[[], T]) -> T:
    try:
        return work()
    except ConfigError as error:
        typer.echo(f"serve-app: {error}", err=True)
        raise typer.Exit(1) from None


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
