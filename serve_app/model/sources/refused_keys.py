"""Unsupported keys of a model's files: an error lists them, unless the operator ignores them by
name.
"""

from collections.abc import Collection, Mapping

from serve_app.errors import ConfigError

_SHOWN = 3
_TOKENIZERS = "tokenizer."
"""Prefix of keys that the tokenizer handles or refuses."""


def check_refused(source: object, refused: Mapping[str, str], ignored: Collection[str]) -> None:
    """Check the unsupported keys. refused: the reason for each key; ignored: the setting
    `ignore_model_keys`.

    Raises ConfigError for a refused key that is not ignored, and for an ignored name that is not
    refused.
    """
    left = {key: reason for key, reason in refused.items() if key not in ignored}
    if left:
        shown = "; ".join(f"`{' '.join(key.split())}` ({reason})" for key, reason in list(left.items())[:_SHOWN])
        more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise ConfigError(
            f"model: {source}: keys that would change the answers are not supported: {shown}{more}. "
            "Name them in the setting `ignore_model_keys` to load the model as if it did not have them"
        )
    unused = sorted(key for key in set(ignored) - refused.keys() if not key.startswith(_TOKENIZERS))
    if unused:
        raise ConfigError(f"ignore_model_keys: {source} has no unsupported key `{unused[0]}`")
