"""torch's attention over pages as a backend: a stand-in does by plain torch what `varlen_attn` documents."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import varlen as torch_varlen

from serve_app.errors import ConfigError
from serve_app.model.attention import selection
from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.gpu import varlen

CPU = torch.device("cpu")
LAYERS = [
    AttentionLayer(6, 2, 32, 32, 0.2),
    AttentionLayer(2, 2, 64, 64, 0.125),
    AttentionLayer(2, 1, 32, 32, 0.125, sliding_window=300),
]


class StandIn:
    """`calls`: the options of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int | None,
    ) -> Tensor:
        self.calls.append({"cu_seq_k": cu_seq_k, "num_splits": num_splits, "gqa": enable_gqa})
        starts = cu_seq_q.tolist()
        assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
        assert starts[-1] == query.shape[0]
        assert max_q == max(high - low for low, high in zip(starts, starts[1:], strict=False))
        assert max_k == int(seqused_k.max())
        assert key.shape[1] % 256 == 0
        out = torch.full_like(query, float("nan"))
        for row, (low, high) in enumerate(zip(starts, starts[1:], strict=False)):
            used = int(seqused_k[row])
            k, v = (pool[block_table[row].long()].flatten(0, 1)[:used].transpose(0, 1).float() for pool in (key, value))
            own = torch.arange(used - (high - low), used)[:, None]
            seen = torch.arange(used)
            mask = (seen <= own + window_size[1]) & ((window_size[0] < 0) | (seen >= own - window_size[0]))
            q = query[low:high].transpose(0, 1).float()
            result = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
            out[low:high] = result[0].transpose(0, 1).to(query.dtype)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(varlen, "_DEVICE", "cpu")
    return stand_in


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_step_reaches_it_as_documented(layer: AttentionLayer, stand_in: StandIn) -> None:
    """Rows of several pages, decodes beside a new prompt, a window; the probe compares with the reference."""
    backend = selection.pick_backend("varlen", [layer], torch.bfloat16, CPU)
    assert backend.block_size == 256
    assert len(stand_in.calls) == 2
    for call in stand_in.calls:
        assert call["num_splits"] == 1, "version 2 leaves rows unwritten where it splits keys"
        assert call["gqa"] == (layer.num_heads != layer.num_kv_heads)
    assert stand_in.calls[1]["cu_seq_k"].tolist() == [0, 259, 259 + 512, 259 + 512 + 1, 259 + 512 + 1 + 766]


def test_version_3_is_taken_where_it_can_be_activated(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "activate_flash_attention_impl", lambda name: None)
    selection.pick_backend("varlen", LAYERS, torch.bfloat16, CPU)
    assert all(call["num_splits"] is None and call["cu_seq_k"] is None for call in stand_in.calls)


def test_rows_left_unwritten_are_noticed(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: Tensor, *args: Any, block_table: Tensor, **options: Any) -> Tensor:
        out = stand_in(query, *args, block_table=block_table, **options)
        out[args[2][1] :] = 0.0
        return out

    monkeypatch.setattr(torch_varlen, "varlen_attn", broken)
    with pytest.raises(ConfigError, match="varlen does not work.*differs from the reference"):
        selection.pick_backend("varlen", LAYERS[:1], torch.bfloat16, CPU)


def test_refusals_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if "block_table" not in inspect.signature(torch_varlen.varlen_attn).parameters:
        pytest.skip(
            f"varlen_attn of torch {torch.__version__} reads no paged pool, and this test is of what else it says"
        )

    def refusal(layer: AttentionLayer = LAYERS[0], dtype: torch.dtype = torch.bfloat16) -> str:
        with pytest.raises(ConfigError) as error:
            selection.pick_backend("varlen", [layer], dtype, CPU)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "for GPUs, not for cpu" in refusal()
    monkeypatch.setattr(varlen, "_DEVICE", "cpu")
    assert "not torch.float32" in refusal(dtype=torch.float32)
    assert "caps no scores" in refusal(AttentionLayer(2, 2, 32, 32, 0.2, softcap=9.0))
    assert "of one width" in refusal(AttentionLayer(2, 2, 32, 16, 0.2))
    assert "NotImplementedError" in refusal(), "torch's own has no kernel for CPUs"
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: query)
    assert "cannot read a paged pool" in refusal()
