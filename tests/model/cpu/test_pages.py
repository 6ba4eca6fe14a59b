"""Memory of a KV pool, which the system gives later."""

import threading

import pytest
import torch

from serve_app.model.cpu.pages import lazy_zeros, populate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2, 5), (513, 64, 129)])
def test_is_zero_and_keeps_what_is_written_meanwhile(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = lazy_zeros(shape, dtype)
    pool[1] = 7
    populate([pool])
    pool[2] = 8
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    assert (pool.shape, pool.dtype) == (torch.Size(shape), dtype)
    assert [pool[index].unique().tolist() for index in range(3)] == [[0], [7], [8]]
    assert not pool[3:].any()
