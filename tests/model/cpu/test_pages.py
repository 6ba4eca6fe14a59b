"""Memory of a KV pool, which the system gives later."""

import ctypes
import mmap
import weakref

import pytest
import torch
from torch import Tensor

from serve_app.model.cpu.pages import Prefault, lazy_zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2, 5), (513, 64, 129)])
def test_is_zero_and_keeps_what_is_written_meanwhile(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = lazy_zeros(shape, dtype)
    pool[1] = 7
    prefault = Prefault([pool])
    pool[2] = 8
    prefault.thread.join()
    assert (pool.shape, pool.dtype) == (torch.Size(shape), dtype)
    assert [pool[index].unique().tolist() for index in range(3)] == [[0], [7], [8]]
    assert not pool[3:].any()


def resident_bytes(tensor: Tensor) -> int:
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), there) == 0
    return sum(page & 1 for page in there) * mmap.PAGESIZE


def test_little_is_given_during_a_step_and_all_of_it_afterwards() -> None:
    pools = [lazy_zeros((2**26,), torch.float16) for _ in range(4)]
    prefault = Prefault(pools)
    with prefault:
        prefault.thread.join(timeout=0.5)
        if not prefault.thread.is_alive():
            pytest.skip("Linux gives no memory beforehand here")
        assert sum(map(resident_bytes, pools)) < sum(pool.nbytes for pool in pools) / 2
    prefault.thread.join()
    assert sum(map(resident_bytes, pools)) >= sum(pool.nbytes for pool in pools)


def test_a_pool_that_is_dropped_meanwhile_is_freed() -> None:
    pool = lazy_zeros((2**26,), torch.float16)
    gone = weakref.ref(pool)
    prefault = Prefault([pool])
    with prefault:
        del pool
        # while the thread asks for a part of it
        while gone() is not None and prefault.thread.is_alive():
            prefault.thread.join(timeout=0.01)
        assert gone() is None
    prefault.thread.join()
