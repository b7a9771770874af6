"""Names under which model libraries reach their sequence kernels, and the `adjcomp.ops` op that takes each one's place while
tracing.

transformers resolves a fused kernel through a function of the modelling module (`mamba_selective_scan`, `causal_conv1d_fn`, …)
and falls back to a Python loop. During capture each such name is bound to a function of this file, which calls the matching op,
so
that a recurrence is one node of the graph. Whole-mixer kernels are bound to "not available", which makes the model take its own
step-by-step path.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from adjcomp.errors import CaptureError
from adjcomp.passes import attention
from adjcomp.passes.lowering_delta import gated_delta_rule
from adjcomp.passes.lowering_mamba_ssm import FUNCTIONS, causal_conv1d, chunk_scan, selective_scan
from adjcomp.passes.lowering_rwkv import rwkv_linear_attention
from adjcomp.passes.lowering_scan import associative_scan

Tensor = torch.Tensor


def _causal_conv1d(
    x_bdt: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """`causal_conv1d_fn` as transformers calls it, with any activation."""
    if activation in (None, "silu", "swish"):
        return causal_conv1d(x_bdt, weight, bias, activation, **options)
    return _activation(activation)(causal_conv1d(x_bdt, weight, bias, **options))


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }
    if name not in known:
        raise CaptureError(f"causal convolution with activation {name!r}; supported: silu, swish, {', '.join(known)}")
    return known[name]


def _unavailable(*_args: Any, **_kwargs: Any) -> None:
    """A whole-mixer kernel that is not there: the model takes its own path, whose parts are captured."""
    return None


ASSOCIATIVE_SCAN = ("torch._higher_order_ops.associative_scan", "associative_scan")
Binding = tuple[dict[str, Any], str, Any]  # a module's names, one of them, and what is to stand there

KERNEL_NAMES: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": selective_scan,
    "selective_scan_fn": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "mamba_chunk_scan_combined": chunk_scan,
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": gated_delta_rule,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "fused_recurrent_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "fused_recurrent_kda": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "rwkv_linear_attention": rwkv_linear_attention,
    "mamba_inner_fn": _unavailable,
    "mamba_split_conv1d_scan_combined": _unavailable,
    "mamba2_split_conv1d_scan_combined": _unavailable,
    "create_causal_mask": attention.full_mask,
    "create_sliding_window_causal_mask": attention.sliding_mask,
}
ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"


@contextlib.contextmanager
def kernels_as_ops() -> Iterator[None]:
    """Bind every kernel name of the loaded transformers modules, and every name of any module for a function of the kernel
    packages or torch's associative scan, to its op; restore all of them at the end, whatever happens.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for namespace, name, substitute in [*_transformers_names(), *_package_names()]:
            replaced.append((namespace, name, namespace[name]))
            namespace[name] = substitute
        yield
    finally:
        for namespace, name, original in reversed(replaced):
            namespace[name] = original


def _transformers_names() -> Iterator[Binding]:
    """The names of transformers' modelling modules, whatever they stand for."""
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith("transformers.models."):
            namespace = vars(module)
            yield from ((namespace, kernel, KERNEL_NAMES[kernel]) for kernel in KERNEL_NAMES if kernel in namespace)
            if ATTENTION_TABLE in namespace:
                yield namespace, ATTENTION_TABLE, attention.Interface(namespace[ATTENTION_TABLE])


def _package_names() -> Iterator[Binding]:
    """All names under which loaded modules know a function of the kernel packages, a user's own modules among them."""
    known: dict[int, Callable[..., Any]] = {}
    for (home, function), substitute in (*FUNCTIONS.items(), (ASSOCIATIVE_SCAN, associative_scan)):
        original = getattr(sys.modules.get(home), function, None)
        if original is not None:
            known[id(original)] = substitute
    if known:
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", {})
            yield from ((namespace, name, known[id(value)]) for name, value in list(namespace.items()) if id(value) in known)
