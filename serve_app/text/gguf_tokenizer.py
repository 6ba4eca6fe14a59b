"""Builds a fast transformers tokenizer from a GGUF file. Ids equal llama.cpp's for the same file.

Decides which keys under `tokenizer.` are used, ignored as harmless, or refused by name. A key that
would change token ids is never ignored.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from serve_app.checkpoints.gguf_header import Field, GgufHeader
from serve_app.errors import ConfigError
from serve_app.text.control_tokens import is_mark
from serve_app.text.pre_tokenizers import PreTokenizer, find_pre_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PREFIX = "tokenizer."
_BYTES, _CHARACTERS, _SENTENCEPIECE = "gpt2", "gemma4", "llama"
"""Values of `tokenizer.ggml.model`. They merge bytes, characters, and tokens by score,
respectively."""
_USED = frozenset(
    {
        "chat_template",
        "ggml.model",
        "ggml.pre",
        "ggml.tokens",
        "ggml.token_type",
        "ggml.scores",
        "ggml.merges",
        "ggml.bos_token_id",
        "ggml.eos_token_id",
        "ggml.eot_token_id",
        "ggml.eom_token_id",
        "ggml.unknown_token_id",
        "ggml.padding_token_id",
        "ggml.add_bos_token",
        "ggml.add_eos_token",
        "ggml.add_space_prefix",
    }
)
_HARMLESS = {
    "ggml.token_type_count": "segment types, which only encoders have",
    "ggml.cls_token_id": "for encoders",
    "ggml.mask_token_id": "for encoders",
    "ggml.seperator_token_id": "separates the two texts of a reranker",
    "ggml.add_sep_token": "separates the two texts of a reranker",
    "ggml.fim_pre_token_id": "found by its name",
    "ggml.fim_suf_token_id": "found by its name",
    "ggml.fim_mid_token_id": "found by its name",
    "ggml.fim_pad_token_id": "pads batches in training",
    "ggml.fim_rep_token_id": "separates files of a repository, which requests do not have",
    "ggml.fim_sep_token_id": "separates files of a repository, which requests do not have",
    "ggml.prefix_token_id": "an older name of fim_pre_token_id",
    "ggml.suffix_token_id": "an older name of fim_suf_token_id",
    "ggml.middle_token_id": "an older name of fim_mid_token_id",
    "chat_templates": "names of templates for special uses; requests get the template without a name",
    "huggingface.json": "the same tokenizer in another format",
}
_HARMLESS_PREFIX = "chat_template."
"""Templates for special uses. Requests use the unnamed template."""
_OFF = {
    "ggml.remove_extra_whitespaces": "merging spaces",
    "ggml.normalizer.lowercase": "lower-casing",
    "ggml.normalizer.strip_accents": "removing accents",
    "ggml.precompiled_charsmap": "a table of replaced characters",
    "ggml.suppress_tokens": "tokens that are never generated",
}
"""Unsupported keys: allowed if off or empty, refused otherwise."""
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Defaults of a SentencePiece vocabulary."""
_ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unknown": "unk", "padding": "pad"}
"""Special tokens: the name in the file, and in transformers."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_IGNORED = "name it in `ignore_model_keys` to load the model without it"
_SPACE_MARK = "\u2581"


def load_gguf_tokenizer(path: Path, ignored: Sequence[str] = ()) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a GGUF file.

    ignored: full names of keys to skip although they are unknown or unsupported. Raises
    `ConfigError` naming a key that is unsupported. A damaged file may raise any exception.
    """
    from transformers import PreTrainedTokenizerFast

    keys = _Keys({name: field for name, field in GgufHeader(path).fields.items() if name not in ignored})
    keys.check()
    vocabulary = _Vocabulary.read(keys)
    if vocabulary.kind == _SENTENCEPIECE:
        backend, add_bos = _sentencepiece(vocabulary, space_in_front=keys.flag("ggml.add_space_prefix", True)), True
    else:
        pre = _pre_tokenizer(vocabulary.kind, keys)
        backend, add_bos = _merging(vocabulary, keys.texts("ggml.merges"), pre), pre.add_bos
    template = keys.text("chat_template")
    backend.add_tokens(list(vocabulary.added_tokens(template or "", rstrip=_strips_space(keys))))
    add = {name: keys.flag(f"ggml.add_{name}_token", default) for name, default in (("bos", add_bos), ("eos", False))}
    for name, wanted in add.items():
        if wanted and f"{name}_token" not in vocabulary.special:
            raise ConfigError(f"model: tokenizer.ggml.add_{name}_token is true, but {name}_token_id is missing")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        add_bos_token=add["bos"],
        add_eos_token=add["eos"],
        **vocabulary.special,
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    """The tokenizer's metadata in a file. Names are without `tokenizer.`."""

    fields: Mapping[str, Field]

    def check(self) -> None:
        """Raise `ConfigError` for unknown keys and unsupported features."""
        for name in self.fields:
            if not name.startswith(_PREFIX):
                continue
            short = name.removeprefix(_PREFIX)
            if short in _OFF:
                parts = self.fields[name].parts
                if len(parts) > 1 or any(bool(part[0]) for part in parts if len(part)):
                    raise ConfigError(f"model: {name} requests {_OFF[short]}, which is not supported; {_IGNORED}")
            elif short not in _USED and short not in _HARMLESS and not short.startswith(_HARMLESS_PREFIX):
                raise ConfigError(f"model: {name} is not supported, and may change token ids; {_IGNORED}")

    def texts(self, name: str) -> list[str]:
        """Return a list of texts. Raises `ConfigError` if the key is missing."""
        field = self.fields.get(_PREFIX + name)
        if field is None:
            raise ConfigError(f"model: the file has no {_PREFIX}{name}")
        return [part.decode() for part in field.parts]

    def numbers(self, name: str) -> list[float] | None:
        """Return a list of numbers; None if the key is missing."""
        field = self.fields.get(_PREFIX + name)
        return None if field is None else [float(part[0]) for part in field.parts]

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return an integer."""
        field = self.fields.get(_PREFIX + name)
        return default if field is None else int(field.parts[0][0])

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        return bool(self.number(name, int(default)))

    def text(self, name: str) -> str | None:
        """Return a text; None if the key is missing."""
        field = self.fields.get(_PREFIX + name)
        return None if field is None else bytes(field.parts[0]).decode()

    @property
    def model_name(self) -> str:
        """The model's name in lower case."""
        field = self.fields.get("general.name")
        return "" if field is None else bytes(field.parts[0]).decode().lower()


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id.

    special: the file's special tokens by transformers' name, such as `eos_token`.
    """

    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    special: dict[str, str]

    @classmethod
    def read(cls, keys: _Keys) -> "_Vocabulary":
        """Read the vocabulary. Raises `ConfigError`."""
        kind = keys.text("ggml.model")
        if kind not in (_BYTES, _CHARACTERS, _SENTENCEPIECE):
            raise ConfigError(
                f"model: tokenizer.ggml.model is {kind!r}, a kind of tokenizer that this server does not support "
                f"(supported: {_BYTES}, {_CHARACTERS}, {_SENTENCEPIECE})"
            )
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(keys.texts("ggml.tokens"))]
        types = keys.numbers("ggml.token_type") or [_NORMAL] * len(tokens)
        scores = keys.numbers("ggml.scores") or [0.0] * len(tokens)
        for name, values in (("token_type", types), ("scores", scores)):
            if len(values) < len(tokens):
                raise ConfigError(f"model: tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")
        twice, times = Counter(tokens).most_common(1)[0] if tokens else ("", 1)
        if times > 1:
            raise ConfigError(f"model: tokenizer.ggml.tokens has {twice!r} more than once")
        defaults = _SENTENCEPIECE_IDS if kind == _SENTENCEPIECE else {}
        special = {}
        for role, name in _ROLES.items():
            token_id = keys.number(f"ggml.{role}_token_id", defaults.get(role))
            if token_id is None:
                continue
            if not 0 <= token_id < len(tokens):
                raise ConfigError(
                    f"model: tokenizer.ggml.{role}_token_id is {token_id}; there are {len(tokens)} tokens"
                )
            special[f"{name}_token"] = tokens[token_id]
        return cls(kind, tokens, [int(one) for one in types], scores, special)

    @property
    def ids(self) -> dict[str, int]:
        """Ids by token."""
        return {token: i for i, token in enumerate(self.tokens)}

    def added_tokens(self, template: str = "", *, rstrip: Callable[[str], bool]) -> Iterator[AddedToken]:
        """Yield the tokens that are matched in a text before pre-tokenization.

        These are control and user-defined tokens, runs of newlines in files with character merges
        (no merge produces them), and the chat template's marks, which some files declare as normal
        tokens.
        """
        named = set(self.special.values())
        for token, kind in zip(self.tokens, self.types, strict=False):
            special = kind in (_UNKNOWN, _CONTROL) or token in named
            is_run = self.kind == _CHARACTERS and not token.strip("\n")
            if special or is_run or kind == _USER_DEFINED or (is_mark(token) and token in template):
                yield AddedToken(token, special=special, normalized=False, rstrip=rstrip(token))

    def merges_by_score(self) -> list[tuple[str, str]]:
        """Return all pairs of tokens that form a token, highest score of that token first."""
        ids = self.ids
        pairs: list[tuple[float, int, int, tuple[str, str]]] = []
        for token_id, token in enumerate(self.tokens):
            if self.types[token_id] in (_UNKNOWN, _CONTROL, _BYTE):
                continue  # text that looks like such a token must not become it
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    pairs.append((-self.scores[token_id], token_id, cut, (left, right)))
        return [pair for *_, pair in sorted(pairs)]


def _pre_tokenizer(kind: str, keys: _Keys) -> PreTokenizer:
    if kind == _CHARACTERS:
        return find_pre_tokenizer(_CHARACTERS)
    name = keys.text("ggml.pre")
    if not name:
        raise ConfigError(
            "model: the file has no tokenizer.ggml.pre, so its pre-tokenizer is unknown; convert the model again with "
            "a current converter"
        )
    return find_pre_tokenizer(name)


def _merging(vocabulary: _Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) < len(merges):
        raise ConfigError("model: tokenizer.ggml.merges has an entry that is not two parts with a space between them")
    model = models.BPE(vocabulary.ids, pairs, ignore_merges=pre.ignore_merges, byte_fallback=not pre.byte_level)
    backend = tokenizers.Tokenizer(model)
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits
    ]
    if pre.byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE_MARK)
        backend.decoder = _space_marks()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return backend


def _sentencepiece(vocabulary: _Vocabulary, *, space_in_front: bool) -> tokenizers.Tokenizer:
    model = models.BPE(
        vocabulary.ids,
        vocabulary.merges_by_score(),
        unk_token=vocabulary.special["unk_token"],
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if space_in_front else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    backend.decoder = _space_marks(strip=1 if space_in_front else 0)
    return backend


def _space_marks(strip: int = 0) -> decoders.Decoder:
    """Decode "▁" to spaces. strip: number of leading spaces to remove, which encoding added."""
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)


def _strips_space(keys: _Keys) -> Callable[[str], bool]:
    """Return a predicate: whether an added token removes the spaces after it.

    GGUF has no key for this. Of the known models only Phi-3 has such tokens.
    """
    if not any(name in keys.model_name for name in ("phi-3", "phi3")):
        return lambda token: False
    return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
