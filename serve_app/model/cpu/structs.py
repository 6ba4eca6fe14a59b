"""Structs of packed weights and of mixtures of experts. Mirrors `kernels/weights.h` and
`kernels/experts.h`.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class PanelStruct(ctypes.Structure):
    """`struct panel`."""

    _fields_ = [("data", c_void_p), ("format", c_int64)]


class WeightStruct(ctypes.Structure):
    """`struct weight`."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("fixed", c_int32),
    ]


class ExpertsStruct(ctypes.Structure):
    """`struct experts`."""

    _fields_ = [("router", WeightStruct), ("gate_up", c_void_p), ("down", c_void_p)]


class MixtureStruct(ctypes.Structure):
    """`struct mixture`."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "used", "width", "renormalised")),
        *((name, c_float) for name in ("alpha", "limit")),
    ]
