"""Fields that are accepted and ignored because they do not change answers. One table per kind of
body.

A table maps a field's name to the values that are accepted: a tuple of values, `ANYTHING`, or
`NOTHING` for a known field that is refused. Null means "not given" for every name. Fields that
would change the answer do not belong here.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

ANYTHING: Final = None
NOTHING: Final = ()

Ignored: TypeAlias = Mapping[str, tuple[object, ...] | None]


def changes_nothing(value: object, harmless: tuple[object, ...] | None) -> bool:
    """Whether a field with this entry may have this value."""
    # True equals 1 in Python, but not in JSON.
    return harmless is ANYTHING or any(
        value == good and isinstance(value, bool) == isinstance(good, bool) for good in harmless
    )


CLIENT: Ignored = {
    # The client's own names and notes, and settings of hosted services.
    "request_id": ANYTHING,
    "rid": ANYTHING,
    "metadata": ANYTHING,
    "client_metadata": ANYTHING,
    "store": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "prompt_cache_options": ANYTHING,
    "prompt_cache_retention": ANYTHING,
    "safety_identifier": ANYTHING,
    "service_tier": ANYTHING,
    "keep_alive": ANYTHING,
    "extra_body": ({},),
}

GENERATION: Ignored = {
    # Samplers that this server does not have: accepted when switched off.
    "length_penalty": (1,),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    # Accepted with the value that this server always uses.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": ANYTHING,
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "cache_prompt": ANYTHING,
    "logits_processors": ([],),
    "n_probs": (0,),
    "min_keep": ANYTHING,
    **CLIENT,
}

CHAT: Ignored = {
    **GENERATION,
    "echo": (False,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "prediction": ANYTHING,  # only affects speed
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "audio": NOTHING,
    "moderation": NOTHING,
    "web_search_options": NOTHING,
    "chat_template": NOTHING,
}

COMPLETION: Ignored = {
    **GENERATION,
    "response_format": ({"type": "text"},),
}

EMBEDDINGS: Ignored = {
    **CLIENT,
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

STREAM_OPTIONS: Ignored = {"include_obfuscation": (False,)}

COMPANIONS: Ignored = {
    # Other servers and gateways add these to their answers, and clients send them back.
    "reasoning_details": ANYTHING,
    "thinking_blocks": ANYTHING,
    "provider_specific_fields": ANYTHING,
    "extra_content": ANYTHING,
}

MESSAGE: Ignored = {
    "id": ANYTHING,
    "object": ANYTHING,
    "type": ("message",),
    "status": ANYTHING,
    "timestamp": ANYTHING,
    "created": ANYTHING,
    "created_at": ANYTHING,
    "model": ANYTHING,
    "finish_reason": ANYTHING,
    "metadata": ANYTHING,
    "annotations": ANYTHING,
    "cache_control": ANYTHING,
    "parsed": ANYTHING,  # SDKs add the content as an object
    **COMPANIONS,
    "audio": NOTHING,
    "function_call": NOTHING,
}

CONTENT_PART: Ignored = {
    "id": ANYTHING,
    "index": ANYTHING,
    "annotations": ANYTHING,
    "cache_control": ANYTHING,
    "citations": ANYTHING,
    "prompt_cache_breakpoint": ANYTHING,
    "logprobs": ANYTHING,
    "parsed": ANYTHING,
    **COMPANIONS,
}

TOOL: Ignored = {"cache_control": ANYTHING}
TOOL_CALL: Ignored = {"index": ANYTHING, "cache_control": ANYTHING, **COMPANIONS}
FUNCTION_CALL: Ignored = {"parsed_arguments": ANYTHING, **COMPANIONS}

RESPONSES: Ignored = {
    "access_programs": NOTHING,
    "background_options": NOTHING,
    "image": NOTHING,
    **GENERATION,
    "context_management": ANYTHING,
    "stream_options": ANYTHING,
    "max_tool_calls": ANYTHING,  # of built-in tools
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": NOTHING,
    "conversation": NOTHING,
    "prompt": NOTHING,
    "moderation": NOTHING,
}

RESPONSES_ITEM: Ignored = {
    "id": ANYTHING,
    "status": ANYTHING,
    "phase": ANYTHING,
    "summary": ANYTHING,
    "encrypted_content": ANYTHING,
    "caller": ANYTHING,
    "namespace": ANYTHING,
    "created_by": ANYTHING,
    "annotations": ANYTHING,
    "parsed_arguments": ANYTHING,
    "async": (False,),
    **COMPANIONS,
}

RESPONSES_TOOL: Ignored = {
    "cache_control": ANYTHING,
    "defer_loading": ANYTHING,
    "output_schema": ANYTHING,
    "allowed_callers": ANYTHING,
    "async": (False,),
}

RESPONSES_TEXT: Ignored = {"verbosity": ("medium",)}
REASONING: Ignored = {"summary": ANYTHING, "generate_summary": ANYTHING, "context": ANYTHING, "mode": ("standard",)}

ANTHROPIC: Ignored = {
    **GENERATION,
    "anthropic_version": ANYTHING,
    "betas": ANYTHING,
    "anthropic_beta": ANYTHING,
    "cache_control": ANYTHING,
    "context_management": ANYTHING,
    "diagnostics": ANYTHING,
    "inference_geo": ANYTHING,
    "speed": ANYTHING,
    "user_profile_id": ANYTHING,
    "workspace_id": ANYTHING,
    "mcp_servers": ([],),
    "thread": NOTHING,
    "container": NOTHING,
}

ANTHROPIC_MESSAGE: Ignored = {
    "id": ANYTHING,
    "type": ("message",),
    "model": ANYTHING,
    "stop_reason": ANYTHING,
    "stop_sequence": ANYTHING,
    "stop_details": ANYTHING,
    "usage": ANYTHING,
    "container": ANYTHING,
    **COMPANIONS,
}

ANTHROPIC_BLOCK: Ignored = {
    "cache_control": ANYTHING,
    "citations": ANYTHING,
    "signature": ANYTHING,
    "data": ANYTHING,
    "caller": ANYTHING,
    "toolset_name": ANYTHING,
    "parsed_output": ANYTHING,
    "is_error": ANYTHING,  # chat templates do not support it; the result's text has the error
    **COMPANIONS,
}

ANTHROPIC_TOOL: Ignored = {
    "type": ("custom",),
    "cache_control": ANYTHING,
    "defer_loading": ANYTHING,
    "eager_input_streaming": ANYTHING,
    "allowed_callers": ANYTHING,
    "input_examples": ANYTHING,
}

ANTHROPIC_OUTPUT: Ignored = {"effort": ANYTHING}
THINKING: Ignored = {"display": ANYTHING}
