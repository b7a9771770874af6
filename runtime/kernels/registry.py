"""Finds the implementation of an op for a device, importing it at the first call only.

An implementation is a function with the op's raw signature (the schema in `adjcomp.ops`). Importing this module registers one
dispatching kernel per op and device; it imports neither a compiler nor Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from adjcomp.ops.library import NAMESPACE, OP_NAMES

Implementation = Callable[..., Any]

# Module that implements an op (and its VJP), below the package of a device.
MODULES = {
    "linear_scan": "linear_scan",
    "dense_scan": "dense_scan",
    "selective_scan": "selective_scan",
    "ssd": "ssd",
    "gated_delta_rule": "gated_delta_rule",
    "causal_conv1d": "causal_conv1d",
    "counter_uniform": "counter_uniform",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_cross_entropy_add": "linear_cross_entropy",
    "rms_norm": "rms_norm",
}
CPU_PACKAGE = "adjcomp.runtime.kernels.cpu"
PACKAGES = {"cpu": CPU_PACKAGE, "cuda": "adjcomp.runtime.kernels.triton"}
# Ops whose one implementation serves every device.
COMMON = {
    "grouped_linear": "adjcomp.runtime.kernels.grouped_linear",
    "linear_attention": "adjcomp.runtime.kernels.linear_attention",
    "max_plus_scan": "adjcomp.runtime.kernels.max_plus_scan",
    "logcumsumexp": "adjcomp.runtime.kernels.logsum",
    "causal_attention": "adjcomp.runtime.kernels.attention",
    "causal_attention_add": "adjcomp.runtime.kernels.attention",
    "linear_scan_window": "adjcomp.runtime.kernels.windowed.linear",
    "dense_scan_window": "adjcomp.runtime.kernels.windowed.linear",
    "selective_scan_window": "adjcomp.runtime.kernels.windowed.selective",
    "ssd_window": "adjcomp.runtime.kernels.windowed.selective",
    "gated_delta_rule_window": "adjcomp.runtime.kernels.windowed.delta",
}
# Where a device's implementation lies elsewhere.
ELSEWHERE = {
    ("linear_cross_entropy", "cpu"): "adjcomp.runtime.kernels.cross_entropy",
    ("linear_cross_entropy_add", "cpu"): "adjcomp.runtime.kernels.cross_entropy",
}
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
VJP_SUFFIX = "_vjp"
SUMMARY_SUFFIXES = ("_adjoint_summary", "_summary")  # the longer one first
SUMMARIES = "adjcomp.runtime.kernels.summaries"  # those of a CPU, made of the ops themselves


def module_name(op: str, device: str) -> str:
    """The dotted name of the module that implements `op` (a forward, a VJP or a summary) on a device type."""
    base = op.removesuffix(VJP_SUFFIX)
    for suffix in SUMMARY_SUFFIXES:
        base = base.removesuffix(suffix)
    if op.endswith(SUMMARY_SUFFIXES) and PACKAGES.get(device) == CPU_PACKAGE:
        return SUMMARIES
    if base in COMMON:
        return COMMON[base]
    if (base, device) in ELSEWHERE:
        return ELSEWHERE[base, device]
    if base not in MODULES or device not in PACKAGES:
        raise NotImplementedError(f"adjcomp::{op} has no kernel for device type {device!r}; supported: {', '.join(PACKAGES)}")
    return f"{PACKAGES[device]}.{MODULES[base]}"


@functools.cache
def find(op: str, device: str) -> Implementation:
    """The implementation of `adjcomp::<op>` for a device type ("cpu", "cuda").

    Raises ImportError where the device needs Triton and it is not installed.
    """
    name = module_name(op, device)
    if name.startswith(PACKAGES["cuda"]) and importlib.util.find_spec("triton") is None:
        raise ImportError(f"adjcomp::{op} on a GPU needs Triton, which is not installed: pip install 'triton>=3.5'")
    function: Implementation = getattr(importlib.import_module(name), op)
    return function


def _dispatcher(op: str, device: str) -> Implementation:
    def run(*args: Any) -> Any:
        return find(op, device)(*args)

    return run


_FRAGMENTS = {device: torch.library.Library(NAMESPACE, "IMPL", key) for device, key in DISPATCH_KEYS.items()}
for _device, _fragment in _FRAGMENTS.items():
    for _op in OP_NAMES:
        _fragment.impl(_op, _dispatcher(_op, _device))
