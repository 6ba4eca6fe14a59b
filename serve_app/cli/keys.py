"""`serve-app keys`: make, list and revoke the API keys of a keys file. A server that watches it follows within 2 s."""

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
    name: Annotated[str, typer.Argument(help="Whose key it is; logs and the ledger tell this name.")],
    file: KeysFile = _DEFAULT_FILE,
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The day (UTC) from which on it is refused.")
    ] = None,
    weight: Annotated[int | None, typer.Option(help="Share of the queue, relative to other keys' (1).")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Generation requests within 60 seconds.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens of prompts and outputs, likewise.")] = None,
    tokens_per_day: Annotated[int | None, typer.Option(help="Tokens within a day of UTC.")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Prompts times `n` at once.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model that it may use; by default all.")] = None,
    prefix_group: Annotated[str | None, typer.Option(help="Keys of one group share cached prefixes.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May see metrics and /debug.")] = False,
) -> None:
    """Make a key, add its hash to the file, and print it: this is the only time that it can be seen."""
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
    """What the file says of each key, a line each. The keys themselves are nowhere."""
    for tenant in _or_exit(lambda: read_key_file(file)).tenants:
        fields = tenant.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        expired = tenant.expires is not None and tenant.expires <= datetime.now(UTC)
        words = [tenant.name, *(f"{field}={_shown(value)}" for field, value in fields.items()), *["EXPIRED"] * expired]
        typer.echo("  ".join(words))


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: KeysFile = _DEFAULT_FILE,
) -> None:
    """Take a key out of the file. Streams that run end as they would; new requests are refused."""
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
