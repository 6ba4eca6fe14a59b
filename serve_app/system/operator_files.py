"""Files that operators edit: text and YAML, bounded in size. Whatever is wrong with one is a `ConfigError` of one line.

Parsers raise whatever their author did not think of: `ValueError` for a date that does not exist, `RecursionError` for
deep nesting. A running server reads these files again, so nothing but a `ConfigError` may come out of it.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError, ServeAppError, one_line

MAX_BYTES = 4 * 2**20
_MAX_NODES = 500_000
"""Of a YAML file, with every alias in full. A keys file of 4 MiB has fewer."""


@contextmanager
def typed_errors(prefix: str = "", *, show_text: bool = True) -> Iterator[None]:
    """Every exception inside becomes a `ConfigError` that begins with `prefix`, unless it is a `ServeAppError`.

    `show_text`: whether the message may hold the exception's text, which may quote the file.
    """
    try:
        yield
    except ServeAppError:
        raise
    except Exception as error:
        reason = one_line(error, kind=True) if show_text else type(error).__name__
        raise ConfigError(f"{prefix}{reason}") from None


def read_text(path: Path) -> str:
    """The file's text. Raises `ConfigError` for a file that cannot be read, is too large or is not UTF-8."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("is not a regular file")
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


class BoundedLoader(yaml.SafeLoader):
    """Names the line of every value that cannot be read."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """See `yaml.constructor.BaseConstructor`."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError, ServeAppError):
            raise
        except Exception:
            problem = "a value that cannot be read (a date that does not exist, a number that is too long)"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def load_yaml(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """The one document in `text`, None if it is empty. Raises `ConfigError`, whose message quotes no value."""
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
        raise ConfigError(f"is not YAML: {getattr(error, 'reason', 'it has no structure')}") from None
    except Exception as error:
        raise ConfigError(f"is not YAML: {type(error).__name__}") from None


def _num_nodes(node: Any, known: dict[int, int]) -> int:
    """Nodes below and including `node`, each alias counted in full. Raises `ConfigError` for a circle."""
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
