"""The model's tokenizer: loading it, text to ids, messages to ids, ids to text. Knows no requests."""

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from serve_app.errors import ConfigError
from serve_app.grammars import Grammars, Vocabulary
from serve_app.model_files import ModelFiles, locate_model
from serve_app.text.chat_template import encode_chat
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.template_check import check_chat_template
from serve_app.text.token_bytes import TokenBytes

DEFAULT_CACHE_DIR = Path("~/.cache/serve_app")


class Tokenizer:
    """Wraps a fast transformers tokenizer. All methods only read, so any thread may call them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Raises `ConfigError` for a tokenizer without the fast (Rust) backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ConfigError(f"model: {name} has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self._tokenizer = tokenizer
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values()) + 1
        """Highest id plus one."""
        self.token_bytes = TokenBytes(backend)
        self._control_tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
        # Byte-level tokens write each byte as one character. Other kinds may drop or fold text: no bound.
        exact = self.token_bytes.byte_level and backend.normalizer is None
        self._longest_token: float = max(map(len, vocab)) if exact else math.inf

    def check_fits(self, vocab_size: int) -> None:
        """Raise `ConfigError` when this tokenizer makes ids that a model with so many logits does not know."""
        if self.vocab_size > vocab_size:
            raise ConfigError(f"model: the tokenizer knows {self.vocab_size} ids, but the logits are {vocab_size} wide")

    def check_chat_template(self) -> None:
        """Raise `ConfigError` when the chat template is broken; takes seconds, most of them in another process."""
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        template = self._tokenizer.chat_template
        check_chat_template(template if isinstance(template, str) else None, special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written in the text count as such. Releases the GIL while it works."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text at once; ids outside the vocabulary have no text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Prompt ids for `messages`; see `chat_template.encode_chat`. Raises `InvalidRequestError`."""
        encode = partial(self.encode, add_special_tokens=False)
        return encode_chat(self._tokenizer, encode, self._control_tokens, messages)

    def vocabulary(self) -> Vocabulary:
        """What grammars must know of it."""
        return Vocabulary(
            tokens=[self.token_bytes(token_id) for token_id in range(self.vocab_size)],
            special_ids=frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special),
            encode=partial(self.encode, add_special_tokens=False),
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over this vocabulary alone; an engine has its own, with the model's ids that end a text."""
        return Grammars(self.vocabulary, [self._tokenizer.eos_token_id or 0], self.vocab_size)

    def min_tokens(self, text: str) -> int:
        """A quick lower bound on the tokens that `encode` makes of `text`; 0 where there is none.

        Bytes that the vocabulary lacks (and that `encode` drops) count as if it had them.
        """
        return int(len(text.encode()) // self._longest_token)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for a continuation of `prompt_token_ids`."""
        return Detokenizer(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(model: str, cache_dir: Path | None = DEFAULT_CACHE_DIR) -> Tokenizer:
    """Load the tokenizer of "default", a local folder, a .gguf file or a hub id. Raises `ConfigError`.

    Reading a GGUF file's vocabulary takes about 5 s and imports torch, so the result is kept under `cache_dir` (None:
    not kept), keyed by the file's identity; the next start reads it in 0.2 s.
    """
    files = locate_model(model)
    try:
        return Tokenizer(_load_cached(files, cache_dir) if files.kind == "gguf" else _load(files), files.name)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its parsers raise; at start-up all of it means this
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model: no usable tokenizer in {files.path or files.source}: {reason}") from error


def _load(files: ModelFiles) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # imports torch, which a start from the cache does without

    return AutoTokenizer.from_pretrained(files.source, gguf_file=files.gguf_file, trust_remote_code=False)


def _load_cached(files: ModelFiles, cache_dir: Path | None) -> PreTrainedTokenizerBase:
    if cache_dir is None or files.path is None:
        return _load(files)
    cache_dir = cache_dir.expanduser()
    stat = files.path.stat()
    identity = f"{files.path}|{stat.st_size}|{stat.st_mtime_ns}|{transformers.__version__}"
    folder = cache_dir / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest()[:20]
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = _load(files)
    _keep(tokenizer, folder)
    return tokenizer


def _keep(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the whole folder or nothing; several processes may try at once, and a read-only disk is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(dir=folder.parent)
    except OSError:
        return
    try:
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
