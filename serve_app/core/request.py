"""A request as it crosses processes (`EngineRequest`) and as the scheduler tracks it (`Request`, one per choice)."""

from dataclasses import dataclass

from serve_app.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine is asked: token ids in, token ids out.

    prior_output_ids: per choice, the output ids another replica already produced (failover); empty = a fresh request.
    cache_salt separates prefix caches (tenants). A lower `priority` number is served sooner.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prior_output_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    priority: int = 0
