"""Reads files that operators edit: text and YAML of limited size.

Any error in a file is a one-line `ConfigError`. Parsers raise unexpected errors: `ValueError` for
an invalid date, `RecursionError` for deep nesting. A running server reads these files again, so
they may raise nothing but `ConfigError`.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError, ServeAppError, one_line

MAX_BYTES = 4 * 2**20
_NOT_REGULAR = "is not a regular file"
_MAX_NODES = 500_000
"""Maximum number of nodes in a YAML file, aliases expanded. A 4 MiB keys file has fewer."""


@contextmanager
def typed_errors(prefix: str = "", *, show_text: bool = True) -> Iterator[None]:
    """Convert every exception inside to a `ConfigError` with `prefix`, except `ServeAppError`s.

    `show_text`: whether to include the exception's text, which may quote the file.
    """
    try:
        yield
    except ServeAppError:
        raise
    except Exception as error:
        reason = one_line(error, kind=True) if show_text else type(error).__name__
        raise ConfigError(f"{prefix}{reason}") from None


def read_text(path: Path) -> str:
    """Return the file's text.

    Raises `ConfigError` if it cannot be read, is too large or is not UTF-8.
    """
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(error.strerror or type(error).__name__) from None
    except ValueError:
        raise ConfigError("the file's name has a NUL byte") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES // 2**20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None


def open_regular(path: Path, flags: int) -> int:
    """Open the regular file `path` and return a descriptor. A new file is private to its owner.

    Raises `ConfigError` if `path` is anything else (a pipe, a device, a folder), and `OSError`.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its other end.
        file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    except IsADirectoryError:
        raise ConfigError(_NOT_REGULAR) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            raise ConfigError(_NOT_REGULAR) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(_NOT_REGULAR)
    return file


class BoundedLoader(yaml.SafeLoader):
    """A YAML loader whose errors name the line of the value."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value; see `yaml.constructor.BaseConstructor`."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError, ServeAppError):
            raise
        except Exception:
            problem = "a value that cannot be read (an impossible date or a number that is too long)"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def load_yaml(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Parse the one YAML document in `text`; None if it is empty.

    Raises `ConfigError`, whose message quotes no value.
    """
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            if _num_nodes(node, {}) > _MAX_NODES:
                raise ConfigError(f"has more than {_MAX_NODES} values, aliases in full")
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except ServeAppError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"is not YAML: {error.problem}{line}") from None
    except RecursionError:
        raise ConfigError("is not usable YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {getattr(error, 'reason', 'no structure')}") from None
    except Exception as error:
        raise ConfigError(f"is not YAML: {type(error).__name__}") from None


def _num_nodes(node: Any, known: dict[int, int]) -> int:
    """Count the nodes below and including `node`, with aliases expanded.

    Raises `ConfigError` for a cycle.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if (count := known.get(id(node))) is not None:
        if count == 0:
            raise ConfigError("is not usable YAML: an alias contains itself")
        return count
    known[id(node)] = 0
    parts = (part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,)))
    known[id(node)] = total = 1 + sum(_num_nodes(part, known) for part in parts)
    return total
