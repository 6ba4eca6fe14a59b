"""Cost of the real model's steps, fitted to measured steps, so that experiments can simulate time.

    seconds = base_s + token_s * positions + pair_s * pairs of a query and a key that it attends to

Each kind of step is measured several times, and its shortest time counts: disturbances only add
time.
"""

from dataclasses import asdict, dataclass

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.experiments.compare_runs import CompareJob, OnTokens, load_packed_model, packed_engine

_ROWS, _PROMPTS, _OUTPUT = (1, 4, 16), (16, 96), 12
_REPEATS = 3
NUM_TOKENS = _REPEATS * _OUTPUT * sum(_ROWS) * len(_PROMPTS)
"""Output tokens that the measurement generates."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Parameters of a step's time. error: mean relative error of the fit at the measured steps."""

    base_s: float
    token_s: float
    pair_s: float
    error: float = 0.0

    def seconds(self, positions: int, pairs: int) -> float:
        """Return the seconds of a step with this many positions and pairs of query and key."""
        return self.base_s + self.token_s * positions + self.pair_s * pairs

    def report(self) -> dict[str, float]:
        """Return the figures as plain data."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}


def pairs_of(start: int, num_tokens: int) -> int:
    """Return the pairs of query and key of a row: each token attends to itself and all tokens
    before it.
    """
    return num_tokens * (2 * start + num_tokens + 1) // 2


def measure_cost(model: str, num_threads: int | None, on_tokens: OnTokens = lambda _: None) -> StepCost:
    """Load the model and measure prompts and decodes of some batch sizes. Raises `ConfigError`."""
    context = max(_PROMPTS) + _OUTPUT
    kv_positions = max(_ROWS) * (context + 16)
    job = CompareJob((), (), max(_ROWS), model, num_threads=num_threads, context=context, kv_positions=kv_positions)
    records: list[StepRecord] = []
    engine = packed_engine(load_packed_model(job), job, records)
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    steps: dict[tuple[int, int, bool], list[tuple[int, int, float]]] = {}
    for repeat in range(_REPEATS):
        for rows in _ROWS:
            for prompt in _PROMPTS:
                for row in range(rows):
                    engine.add(EngineRequest(f"{repeat}-{rows}-{prompt}-{row}", (5,) * prompt, params))
                while engine.has_unfinished:
                    on_tokens(len(engine.step() or ()))
                for record in records:
                    kind = rows, prompt, record.num_prefill_tokens > 0
                    steps.setdefault(kind, []).append(_measured(record))
                records.clear()
    return fit([min(some, key=lambda one: one[2]) for some in steps.values()])


def _measured(record: StepRecord) -> tuple[int, int, float]:
    pairs = sum(pairs_of(row.start, row.num_tokens) for row in record.rows)
    seconds = record.schedule_s + record.model_s + record.update_s
    return record.num_prefill_tokens + record.num_decode_tokens, pairs, seconds


def fit(steps: list[tuple[int, int, float]]) -> StepCost:
    """Fit the cost by least squares of relative errors, with no negative parameter. steps:
    positions, pairs, seconds.
    """
    import numpy as np

    features = np.array([(1, positions, pairs) for positions, pairs, _ in steps], dtype=float)
    seconds = np.array([one[2] for one in steps])
    used = [0, 1, 2]
    while True:
        parts = np.zeros(3)
        parts[used] = np.linalg.lstsq(features[:, used] / seconds[:, None], np.ones(len(steps)))[0]
        if parts.min() >= 0:
            break
        used.remove(int(parts.argmin()))
    error = float(np.abs(features @ parts / seconds - 1).mean())
    base_s, token_s, pair_s = map(float, parts)
    return StepCost(base_s, token_s, pair_s, error)
