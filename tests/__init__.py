"""Tests. Without a GPU, Triton's kernels are interpreted; Triton reads its switch when it is
imported, and transformers imports it, so the switch is set before anything else."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
