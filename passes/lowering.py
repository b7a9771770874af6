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

from adjcomp import ops
from adjcomp.errors import CaptureError
from adjcomp.passes.lowering_delta import gated_delta_rule
from adjcomp.passes.packing import refuse_packing

Tensor = torch.Tensor


def _selective_scan(
    x_bdt: Tensor,
    dt_bdt: Tensor,
    A: Tensor,
    B_bnt: Tensor,
    C_bnt: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan_fn` of mamba_ssm: channels before time."""
    refuse_packing("selective scan", options)
    z_btd = None if z is None else z.transpose(1, 2)
    y, last = ops.selective_scan(
        x_bdt.transpose(1, 2),
        dt_bdt.transpose(1, 2),
        A,
        B_bnt.transpose(1, 2),
        C_bnt.transpose(1, 2),
        D,
        z_btd,
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
    )
    y_bdt = y.transpose(1, 2)
    return (y_bdt, last) if return_last_state else y_bdt


def _chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_chunk_scan_combined` of mamba_ssm; its chunk_size is a tuning knob of that kernel and changes no value."""
    refuse_packing("chunk scan", options)
    limit = None if tuple(dt_limit) == (0.0, float("inf")) else (float(dt_limit[0]), float(dt_limit[1]))
    y, last = ops.ssd(x, dt, A, B, C, D, z, initial_states, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=limit)
    return (y, last) if return_final_states else y


def _causal_conv1d(
    x_bdt: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """`causal_conv1d_fn` of causal_conv1d: channels before time."""
    refuse_packing("causal convolution", options)
    if options.get("initial_states") is not None or options.get("return_final_states"):
        raise CaptureError("causal convolution was called with states of its own: pass the whole sequence in one call")
    fused = activation in (None, "silu", "swish")
    y, _ = ops.causal_conv1d(x_bdt.transpose(1, 2), weight, bias, activation="silu" if fused and activation else None)
    if not fused:
        y = _activation(str(activation))(y)
    return y.transpose(1, 2)


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


KERNEL_NAMES: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective_scan,
    "selective_scan_fn": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_chunk_scan_combined": _chunk_scan,
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": gated_delta_rule,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "fused_recurrent_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "fused_recurrent_kda": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba_inner_fn": _unavailable,
    "mamba_split_conv1d_scan_combined": _unavailable,
    "mamba2_split_conv1d_scan_combined": _unavailable,
}


@contextlib.contextmanager
def kernels_as_ops() -> Iterator[None]:
    """Bind every kernel name of the loaded transformers modules to its op; restore all of them at the end, whatever happens."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, module in list(sys.modules.items()):
            if module is None or not name.startswith("transformers.models."):
                continue
            namespace = vars(module)
            for kernel, substitute in KERNEL_NAMES.items():
                if kernel in namespace:
                    replaced.append((namespace, kernel, namespace[kernel]))
                    namespace[kernel] = substitute
        yield
    finally:
        for namespace, kernel, original in replaced:
            namespace[kernel] = original
