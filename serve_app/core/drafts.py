"""Distributes draft tokens in a step. Prompts come first; drafts use the remaining tokens."""

from serve_app.core.config import SchedulerConfig
from serve_app.core.kv_cache_manager import KVCacheManager
from serve_app.core.request import Request
from serve_app.core.step_plan import StepPlan

MAX_DRAFTS = 15
"""Maximum per row. Together with its newest token, they fill a tile of the widest kernels."""
_MAX_FORCED = 16
"""Maximum of forced drafts per row. Each forced token is computed once, now or in a later step."""


def add_drafts(plan: StepPlan, config: SchedulerConfig, kv: KVCacheManager, num_running: int) -> None:
    """Add drafts to the plan's decodes whose last token is known, in order of service.

    One block per running request stays free.
    """
    decodes = plan.decodes()
    if config.speculation == "off" or not decodes:
        return
    proposals = _Proposals(config, len(decodes))
    for index, request in decodes:
        if plan.budget == 0:
            return
        drafts = proposals.next(request, plan.budget)
        if drafts and kv.can_grow(request, len(drafts), reserve=num_running):
            plan.add_drafts(index, kv.grow(request, len(drafts)) or (), drafts)


class _Proposals:
    """Limits drafts: they must be likely enough (see `draft_cost`).

    Decodes with drafts use at most half of a step's tokens. Forced tokens cost nothing extra,
    because they would be computed later.
    """

    def __init__(self, config: SchedulerConfig, num_decodes: int) -> None:
        self._least_chance = config.draft_cost.least_chance(num_decodes)
        self._room = config.max_num_batched_tokens // 2 - num_decodes if self._least_chance <= 1 else 0

    def next(self, request: Request, left: int) -> tuple[int, ...]:
        """Return the drafts for `request`. `left`: tokens left in the step."""
        if request.forced:
            return request.draft(min(_MAX_FORCED, left), self._least_chance)
        drafts = request.draft(min(MAX_DRAFTS, self._room, left), self._least_chance)
        self._room -= len(drafts)
        return drafts
