"""Which of a module's tensors a file's tensor is, where files and modules put different prefixes in
front of their names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.model.executor import UnsupportedModelError

_PREFIXES = re.compile(r"(?:(?:model|language_model|text_model|language|thinker)\.)*")
"""What files and modules put in front of a text model's tensors, in any order."""


def file_names(found: Iterable[str], module_names: Iterable[str]) -> Mapping[str, str]:
    """Return the file's name of each of the module's tensors that the file has.

    Names that are equal without their prefixes are the same tensor. Raises UnsupportedModelError if
    several of a file are.
    """
    wanted = {_short(name): name for name in module_names}
    names: dict[str, str] = {}
    for name in found:
        if (known := wanted.get(_short(name))) is not None and names.setdefault(known, name) != name:
            raise UnsupportedModelError(f"{name} and {names[known]} have the same name in its module")
    return names


def is_left_out(name: str, left_out: Iterable[str], module: Any) -> bool:
    """Whether a tensor of a file belongs to one of a wrapper's parts that are not loaded, or to
    what transformers' class ignores.
    """
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    return _short(name).partition(".")[0] in left_out or any(re.search(pattern, name) for pattern in ignored)


def _short(name: str) -> str:
    prefix = _PREFIXES.match(name)
    return name[prefix.end() :] if prefix else name
