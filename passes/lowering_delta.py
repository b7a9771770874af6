"""The gated delta rule as transformers and fla spell it: one decay a head (Qwen3-Next, Qwen3.5, OLMo Hybrid), or one a key
channel (Kimi Delta Attention).

Their kernels scale the queries, may normalise queries and keys, and let a key head serve several value heads; all of that is
done here before `adjcomp.ops.gated_delta_rule`, in float32 as in the originals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjcomp import ops
from adjcomp.errors import CaptureError
from adjcomp.passes.packing import refuse_packing

_NORM_EPS = 1e-6
# What some versions of the fused kernels compute beside the rule; none of it is done here.
_REFUSED = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "head_first", "transpose_state_layout", "cp_context", "A_log")


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule`, `chunk_kda` and their step-by-step forms; a chunk size is a knob of the kernel.

    query, key: (B, T, G, K). value: (B, T, H, V) with H a multiple of G. beta: (B, T, H).
    g, log decays: (B, T, H) or (B, T, H, K).
    initial_state: (B, H, K, V). Returns y (B, T, H, V) in the query's dtype, and the last state where it is asked for.
    """
    refuse_packing("the gated delta rule", options)
    for name in _REFUSED:
        if options.get(name) is not None and options[name] is not False:
            raise CaptureError(f"the gated delta rule was called with {name}, which has no counterpart in adjcomp.ops")
    heads = value.shape[2]
    q, k = (_normalised(_for_heads(t, heads).float(), use_qk_l2norm_in_kernel) for t in (query, key))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state = None if initial_state is None else initial_state.float()
    v = value if value.dtype is query.dtype else value.float()
    y, last = ops.gated_delta_rule(q, k, v, g, beta, state)
    return y.to(query.dtype), last if output_final_state else None


def _for_heads(t: Tensor, heads: int) -> Tensor:
    """Keys or queries once for each value head: head h reads key head h // (heads / key heads)."""
    batch, steps, own, width = t.shape
    if own == heads:
        return t
    return t[:, :, :, None].expand(batch, steps, own, heads // own, width).reshape(batch, steps, heads, width)


def _normalised(t: Tensor, wanted: bool) -> Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _NORM_EPS) if wanted else t
