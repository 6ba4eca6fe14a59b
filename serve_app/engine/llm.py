"""The engine as a library: prompts in, completions out. No server, event loop or Ray.

Converts prompts to requests, and deltas to outputs. The engine does everything else.
"""

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from serve_app.core import autosize
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import Pooling, SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import EngineError, InvalidRequestError
from serve_app.model.options import ModelOptions
from serve_app.text.choice_scores import Odds, answer_tokens, odds, scoring_params
from serve_app.text.stream import StopConfig, TextStream
from serve_app.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One choice.

    `logprobs`: one entry per token if requested by `SamplingParams.logprobs`, else None. With
    finish_reason ERROR, `error` is the engine's reason, and the other fields contain the output
    before the error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    embedding: bytes | None = None
    """The prompt's embedding; see `LLM.embed`."""


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its completions. `prompt` is None if token ids were given.

    prompt_logprobs: for each prompt token after the first, if requested by
    `SamplingParams.prompt_logprobs`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None = None


class LLM:
    """A loaded model. `with LLM(...) as llm:` calls `close` at the end.

    - tokenizer: its location in the forms that `model` allows, or a loaded tokenizer; None: the
      model's.
    - max_num_seqs: sequences that run at once; "auto": as many as KV pool and measured step times
      allow.
    - max_num_batched_tokens: tokens per step; "auto": measured.
    - ignore_model_keys: as in `ModelOptions`.
    - `**knobs`: other fields of `EngineConfig`, such as kv_cache_gib.

    Raises `ConfigError` if the model cannot be loaded so.
    """

    def __init__(
        self,
        model: str = "default",
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        attention_backend: str = "auto",
        quantization: str = "none",
        tokenizer: str | Tokenizer | None = None,
        max_num_seqs: int | Literal["auto"] = "auto",
        max_num_batched_tokens: int | Literal["auto"] = "auto",
        ignore_model_keys: Sequence[str] = (),
        **knobs: Any,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = load_tokenizer(tokenizer or model, ignored=() if tokenizer else ignore_model_keys)
        self.tokenizer = tokenizer
        options = ModelOptions(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            quantization=quantization,
            end_ids=self.tokenizer.end_ids,
            ignore_model_keys=tuple(ignore_model_keys),
        )
        most_tokens = autosize.MAX_STEP_TOKENS if max_num_batched_tokens == "auto" else max_num_batched_tokens
        config = EngineConfig(
            model=options,
            max_num_seqs=autosize.max_slots(most_tokens) if max_num_seqs == "auto" else max_num_seqs,
            max_num_batched_tokens=most_tokens,
            auto_slots=max_num_seqs == "auto",
            auto_step_tokens=max_num_batched_tokens == "auto",
            **knobs,
        )
        core = EngineCore.load(config, vocabulary=self.tokenizer.vocabulary)
        self.tokenizer.check_fits(core.info.vocab_size)
        self._core: EngineCore | None = core
        self._ids = itertools.count()

    @property
    def core(self) -> EngineCore:
        """The engine. Raises `EngineError` after `close`."""
        if self._core is None:
            raise EngineError("this LLM is closed")
        return self._core

    def close(self) -> None:
        """Free the memory of weights and KV pool. Later calls raise `EngineError`."""
        self._core = None
        gc.collect()  # a model's modules have reference cycles

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids) in one batch.

        Returns results in the order given. params: one for all prompts (None: the defaults) or one
        per prompt. Raises `InvalidRequestError` before anything runs if a prompt is refused, and
        `EngineError` if the engine breaks down. A prompt that fails does not affect others: its
        choices end with finish_reason ERROR.
        """
        items: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(items)
        if len(each) != len(items):
            raise InvalidRequestError(f"`params` has {len(each)} entries for {len(items)} prompts", param="params")
        results: dict[str, RequestOutput] = {}
        try:
            for prompt, one in zip(items, each, strict=True):
                self._add(prompt, one, results)
            with _progress(sum(len(result.outputs) for result in results.values())) as advance:
                self._run(results, advance)
        except BaseException:
            for request_id in results:
                self.core.abort(request_id)
            raise
        for result in results.values():
            for output in result.outputs:
                output.text = self._text(result.prompt_token_ids, output)
        return list(results.values())

    def odds(self, prompt: str | Sequence[int], answers: Sequence[str]) -> list[Odds]:
        """Return how likely each of `answers` is to follow `prompt`, compared to the other answers.

        Results are in the order of `answers`. See `text.choice_scores`. Raises as `generate` does.
        """
        if not answers:
            raise InvalidRequestError("`answers` must contain at least one text", param="answers")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        end_ids = self.core.info.eos_token_ids
        prompts = [[*ids, *answer] for answer in answer_tokens(self.tokenizer, answers, end_ids)]
        params = scoring_params(len(ids))
        # Run the first one alone, so that the others find the prompt in the prefix cache.
        scored = self.generate(prompts[:1], params) + self.generate(prompts[1:], params)
        return odds(answers, [[entry.logprob for entry in one.prompt_logprobs or ()] for one in scored])

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        dimensions: int | None = None,
        pooling: Pooling | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return embeddings of length 1 as an array [prompts, dimensions].

        pooling None: as the checkpoint says, else the last token's. Raises as `generate` does, and
        `EngineError` for a prompt that fails.
        """
        params = SamplingParams.for_embedding(pooling or self.core.info.pooling, dimensions)
        outputs = [result.outputs[0] for result in self.generate(prompts, params)]
        for number, output in enumerate(outputs):
            if output.embedding is None:
                raise EngineError(f"prompt {number}: {output.error}")
        vectors = b"".join(output.embedding or b"" for output in outputs)
        return np.frombuffer(vectors, "<f4").reshape(len(outputs), dimensions or self.core.info.hidden_size)

    def _add(self, prompt: str | Sequence[int], params: SamplingParams, results: dict[str, RequestOutput]) -> None:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = f"llm-{next(self._ids)}"
        self.core.add(EngineRequest(request_id, tuple(ids), params))
        logprobs = params.logprobs is not None
        results[request_id] = RequestOutput(
            text,
            ids,
            [CompletionOutput(i, logprobs=[] if logprobs else None) for i in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )

    def _text(self, prompt_token_ids: Sequence[int], output: CompletionOutput) -> str:
        """Return the text as a server does: continuing the prompt, without the end token."""
        ended = None if output.finish_reason is FinishReason.ERROR else output.finish_reason
        delta = TokenDelta("", output.index, 0, tuple(output.token_ids), finish_reason=ended)
        return TextStream(self.tokenizer, prompt_token_ids, StopConfig()).feed(delta).text

    def _run(self, results: dict[str, RequestOutput], advance: Callable[[list[TokenDelta]], None]) -> None:
        while self.core.has_unfinished:
            deltas = self.core.step()
            if deltas is None:
                assert self.core.wake_time is not None
                time.sleep(max(0.0, self.core.wake_time - self.core.clock()))
                continue
            for delta in deltas:
                _collect(delta, results[delta.request_id])
            advance(deltas)


def _collect(delta: TokenDelta, result: RequestOutput) -> None:
    output = result.outputs[delta.choice]
    output.token_ids += delta.token_ids
    output.finish_reason = delta.finish_reason
    output.error = None if delta.error is None else delta.error.message
    output.embedding = delta.embedding
    if output.logprobs is not None:
        output.logprobs += delta.logprobs
    if result.prompt_logprobs is not None:
        result.prompt_logprobs += delta.prompt_logprobs


@contextmanager
def _progress(num_choices: int) -> Iterator[Callable[[list[TokenDelta]], None]]:
    """Show a progress bar of finished completions and tokens, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda deltas: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("completions, {task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_choices, tokens=0)
        tokens = 0

        def advance(deltas: list[TokenDelta]) -> None:
            nonlocal tokens
            tokens += sum(len(delta.token_ids) for delta in deltas)
            progress.update(task, advance=sum(delta.finish_reason is not None for delta in deltas), tokens=tokens)

        yield advance
