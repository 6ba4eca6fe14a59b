"""The model's tokenizer: loading, text to ids, messages to ids, ids to text. Independent of
requests."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.checkpoints.model_files import CACHE_DIR, ModelFiles, locate_model
from serve_app.errors import ConfigError
from serve_app.grammars import Grammars
from serve_app.grammars.token_set import Vocabulary
from serve_app.system.code_digest import digest_code
from serve_app.text.chat_template import Ending, encode_chat, takes_role, template_variables, write_calls
from serve_app.text.control_tokens import find_pattern, is_mark
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.fill_in_the_middle import FillInTheMiddle
from serve_app.text.folding import TemplateOrder, fold
from serve_app.text.gguf_tokenizer import load_gguf_tokenizer
from serve_app.text.prefix_encoder import PrefixEncoder, encoding_of
from serve_app.text.template_check import check_chat_template
from serve_app.text.token_bytes import TokenBytes
from serve_app.text.tool_format import (
    HERMES,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    find_reasoning,
    find_tool_format,
)
from serve_app.text.turn_end import find_turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL = 32
"""Number of prompt tokens at the end that are searched for a reasoning's opening mark."""

_KEPT = 4
"""Cached tokenizers per file, since several versions of this package may run on one machine."""


class Tokenizer:
    """Wraps a fast transformers tokenizer. Thread-safe."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str, tools: str = "auto") -> None:
        """tools: `auto` to detect the tool format from the chat template, or `hermes`.

        Raises `ConfigError` for a tokenizer without the fast (Rust) backend.
        """
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
        """The highest id plus one."""
        self.token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._num_ordinary = max((i for i in vocab.values() if i not in added), default=-1) + 1
        self._control_tokens = [token.content for token in added.values()]
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Ids of the special tokens, by token."""
        self._tools = tools
        self._middle = FillInTheMiddle.find(backend.token_to_id)
        # Byte-level tokens write each byte as one character. Other kinds may drop or fold text, so
        # they give no bound.
        self._exact = self.token_bytes.byte_level and backend.normalizer is None
        self._longest_token: float = max(map(len, vocab)) if self._exact else math.inf
        self._prefixes = PrefixEncoder(backend) if self._exact else None

    @cached_property
    def digest(self) -> str:
        """A digest, equal for tokenizers that give the same ids for every text and chat."""
        special = {name: str(token) for name, token in sorted(self._tokenizer.special_tokens_map.items())}
        parts = (self._backend.to_str(), self._tokenizer.chat_template, special)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_fits(self, vocab_size: int) -> None:
        """Raise `ConfigError` if ordinary text can have ids beyond `vocab_size` logits.

        Added tokens beyond the logits are refused per request: Gemma 3 has one for images.
        """
        if self._num_ordinary > vocab_size:
            raise ConfigError(
                f"model: the tokenizer has {self._num_ordinary} ids, but the model has only {vocab_size} logits"
            )

    def check_chat_template(self) -> None:
        """Raise `ConfigError` if the chat template is broken.

        Takes seconds, mostly in another process.
        """
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        template = self._tokenizer.chat_template
        check_chat_template(template if isinstance(template, str) else None, special)

    def encode(self, text: str, *, add_special_tokens: bool = True, scope: str | None = None) -> list[int]:
        """Return token ids. Special tokens in the text become special tokens.

        scope: texts with the same scope share a prefix cache; None: no cache.
        """
        if scope is not None and self._prefixes is not None:
            return self._prefixes.encode(text, add_special_tokens=add_special_tokens, scope=scope)
        ids: list[int] = encoding_of(self._backend, text, add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode a whole text, as a `detokenizer` without a prompt does."""
        decoder = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(decoder.step, token_ids), decoder.flush()])

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """The model's reasoning format; None if its chat template has none."""
        return find_reasoning(self._render)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The model's tool call format; None if unknown."""
        if self._tools == "hermes":
            return HERMES
        return find_tool_format(self._render, self._control_tokens, self.reasoning)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Matches special tokens, and other added tokens that the chat template writes, except
        white space."""
        template = str(self._tokenizer.chat_template)
        found = [token for token in self._control_tokens if token in self.special_ids or token in template]
        return find_pattern([token for token in found if token.strip()])

    def _encode_parts(self, parts: Sequence[tuple[str, bool]], scope: str | None) -> list[int]:
        """Return the ids of a text in parts: (part, whether added tokens in it are text)."""
        encode = partial(self.encode, add_special_tokens=False, scope=scope)
        ids: list[int] = []
        for part, as_text in parts:
            run = self._run if as_text else encode
            # Some tokenizers add a space before a text. That must happen only before the whole
            # text.
            before = [] if self._exact or not ids else run("\n")
            whole = run(f"\n{part}") if before else []
            ids += whole[len(before) :] if before and whole[: len(before)] == before else run(part)
        return ids

    def _run(self, text: str) -> list[int]:
        """Encode with the tokenizer's stages, but without its added tokens."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    @cached_property
    def template_order(self) -> TemplateOrder:
        """The orders of roles that the chat template supports."""
        return TemplateOrder.of(self._render)

    def learn_formats(self) -> None:
        """Compute cached properties that the first chat needs; takes about 10 ms."""
        _ = self.reasoning, self.tool_format, self.template_variables, self.template_order, self.end_ids

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables of the chat template that a request may set."""
        template = self._tokenizer.chat_template
        return template_variables(template if isinstance(template, str) else None)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
        scope: str | None = None,
    ) -> list[int]:
        """Return the prompt ids for `messages`; see `chat_template.encode_chat`.

        scope: as for `encode`. Raises `InvalidRequestError`.
        """
        messages = fold(messages, self.template_order)
        written = write_calls(messages, tools, self.tool_format) if tools or _has_calls(messages) else messages
        in_template = self.tool_format is not None and self.tool_format.in_template
        return encode_chat(
            self._tokenizer,
            partial(self._encode_parts, scope=scope),
            self._control_pattern,
            written,
            tools if in_template else (),
            variables or {},
            ending,
        )

    def takes_role(self, role: str) -> bool:
        """Whether the chat template supports this role."""
        return takes_role(self._render, role)

    def thinking_after(self, prompt_token_ids: Sequence[int]) -> Thinking | None:
        """Return the reasoning that may follow this prompt.

        None if the prompt has closed it, or the model has no reasoning.
        """
        form = self.reasoning
        if form is None:
            return None
        tail = self.decode(prompt_token_ids[-_TAIL:]).rstrip()
        return None if tail.endswith(form.close.rstrip()) else Thinking(form, tail.endswith(form.open.rstrip()))

    def _render(self, messages: Sequence[dict[str, Any]], **how: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **how)
        return text

    def info(self) -> dict[str, Any]:
        """Return the tokenizer's configuration as plain data."""
        inner = self._tokenizer
        special = {name: str(token) for name, token in inner.special_tokens_map.items() if isinstance(token, str)}
        return {
            "tokenizer_class": type(inner).__name__,
            "vocab_size": self.vocab_size,
            **special,
            "chat_template": inner.chat_template,
        }

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary for grammars."""
        return Vocabulary(
            tokens=[self.token_bytes(token_id) for token_id in range(self.vocab_size)],
            special_ids=frozenset(self.special_ids.values()),
            encode=partial(self.encode, add_special_tokens=False),
        )

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: first the one that ends a chat answer, then the tokenizer's own.

        Its own are the ends of sequence, turn and message. Renders the chat template.
        """
        named = self._tokenizer.special_tokens_map
        marks = () if self.reasoning is None else (self.reasoning.open.strip(), self.reasoning.close.strip())
        # Some files do not declare their marks as special.
        control = [token for token in self._control_tokens if token in self.special_ids or is_mark(token)]
        turn_end = find_turn_end(self._render, control, marks) if self._tokenizer.chat_template else None
        tokens = [turn_end, *(named.get(f"{name}_token") for name in ("eos", "eot", "eom"))]
        ids = [self._backend.token_to_id(str(token)) for token in tokens if token is not None]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def fill_in(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Return the prompt for the text between the texts of these ids. Check `fills_in` first."""
        assert self._middle is not None
        return self._middle.prompt(before, behind, self._tokenizer.bos_token_id)

    @property
    def fills_in(self) -> bool:
        """Whether the tokenizer supports fill-in-the-middle."""
        return self._middle is not None

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars for checks over this vocabulary.

        The engine has its own, with all ids that end its texts.
        """
        return Grammars(self.vocabulary, self.end_ids or (0,), self.vocab_size)

    def min_tokens(self, text: str) -> int:
        """Return a quick lower bound on `encode`'s number of tokens; 0 if there is none.

        Bytes that the vocabulary lacks (and that `encode` drops) count as if it had them.
        """
        return int(len(text.encode()) // self._longest_token)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, markers: str = ""
    ) -> Detokenizer:
        """Return an incremental decoder for a continuation of `prompt_token_ids`.

        skip_special_tokens: hide special tokens, except those in `markers`.
        """
        hidden = {token_id for token, token_id in self.special_ids.items() if token not in markers}
        return Detokenizer(self.token_bytes, prompt_token_ids, hidden_ids=hidden if skip_special_tokens else ())


def _has_calls(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def load_tokenizer(
    model: str, cache_dir: Path | None = CACHE_DIR, *, tools: str = "auto", ignored: Sequence[str] = ()
) -> Tokenizer:
    """Load the tokenizer of "default", a local folder, a .gguf file or a hub id.

    tools: as for `Tokenizer`. ignored: keys of a GGUF file to skip, such as
    `tokenizer.ggml.new_key`.
    Building one from a GGUF file takes a second or more. So it is cached under `cache_dir` (None:
    no cache), by the file's identity and by the code that built it. The next start loads it in 0.2
    s.
    Raises `ConfigError`.
    """
    files = locate_model(model)
    try:
        loaded = _load_cached(files, cache_dir, ignored) if files.kind == "gguf" else _load(files)
        return Tokenizer(loaded, files.name, tools)
    except ConfigError:
        raise
    except Exception as error:  # transformers may raise any exception here
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model: no usable tokenizer in {files.path or files.source}: {reason}") from error


def _load(files: ModelFiles, ignored: Sequence[str] = ()) -> "PreTrainedTokenizerBase":
    if files.kind == "gguf":
        assert files.path is not None
        return load_gguf_tokenizer(files.path, ignored)
    from transformers import AutoTokenizer  # imports torch, which GGUF files do not need

    return AutoTokenizer.from_pretrained(files.source, revision=files.commit or "main", trust_remote_code=False)


def _load_cached(files: ModelFiles, cache_dir: Path | None, ignored: Sequence[str]) -> "PreTrainedTokenizerBase":
    if cache_dir is None or files.path is None:
        return _load(files, ignored)
    import transformers  # takes 0.5 s, so not at module import

    stat = files.path.stat()
    made_by = f"{digest_code('checkpoints', 'text')} {transformers.__version__} {tokenizers.__version__}"
    key = Key(files.path, str(sorted(ignored)), f"{stat.st_size} {stat.st_mtime_ns} {made_by}")
    try:
        return DiskCache(cache_dir, "tokenizers", keep=_KEPT).get(
            key,
            lambda folder: _load(files, ignored).save_pretrained(folder),
            transformers.PreTrainedTokenizerFast.from_pretrained,
        )
    except OSError:  # the cache is optional
        return _load(files, ignored)
