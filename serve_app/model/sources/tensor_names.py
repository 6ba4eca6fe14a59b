"""Which of a module's tensors a file's tensor is, where both have other prefixes in front of their
names, as the files of wrappers do.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.wrappers import layers_of

_PREFIXES = re.compile(r"(?:(?:model|language_model|text_model|language|thinker)\.)*")
"""What files and modules put in front of a text model's tensors, in any order."""


def module_names(found: Iterable[str], module: Any, left_out: Collection[str]) -> Mapping[str, str]:
    """Return the module's name of each of a file's tensors.

    Tensors that are left out have none; those that the module lacks keep their names behind the
    prefix of its layers. Raises UnsupportedModelError if several tensors get the same name.
    """
    known, layers = module.state_dict(keep_vars=True).keys(), layers_of(module)
    prefix = next(f"{name}." for name, part in module.named_modules() if part is layers)
    names: dict[str, str] = {}
    for name in found:
        if name in known:
            names[name] = name
        elif not is_left_out(name, left_out, module):
            short = _short(name)
            names[name] = short if short in known else prefix + short
    if len({*names.values()}) < len(names):
        raise UnsupportedModelError("several tensors have the same name without their prefixes")
    return names


def is_left_out(name: str, left_out: Collection[str], module: Any) -> bool:
    """Whether a tensor of a file belongs to one of a wrapper's parts that are not loaded, or to
    what transformers' class ignores.
    """
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    return _short(name).partition(".")[0] in left_out or any(re.search(pattern, name) for pattern in ignored)


def _short(name: str) -> str:
    prefix = _PREFIXES.match(name)
    return name[prefix.end() :] if prefix else name
