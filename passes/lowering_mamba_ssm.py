"""Functions of the packages mamba_ssm and causal_conv1d in terms of `adjcomp.ops`, for models that are written with them.

Their kernels are `autograd.Function`s over code for one device, which no trace sees through. While a model is traced, each
function of `FUNCTIONS` stands under every name that any loaded module gave it (see `adjcomp.passes.lowering`). What a fused
kernel does in one pass (`mamba_inner_fn`, `mamba_split_conv1d_scan_combined`, the norms) is written out as ops of a tile.

Legend: b batch, l time, d channels, n states, h heads, p channels of a head, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from adjcomp import ops
from adjcomp.errors import CaptureError
from adjcomp.passes.packing import refuse_packing

Tensor = torch.Tensor
NO_LIMIT = (0.0, float("inf"))


def selective_scan(
    x_bdl: Tensor,
    dt_bdl: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan_fn`: channels before time. B, C: (b, n, l), or (b, g, n, l) for g groups of channels."""
    refuse_packing("selective_scan_fn", options)
    if A.is_complex() or B.dim() not in (3, 4) or C.dim() != B.dim():
        raise CaptureError(
            f"selective_scan_fn with A {A.dtype} {tuple(A.shape)} and B, C of {B.dim()} and {C.dim()} dimensions: supported are "
            "a real A, and B and C that depend on time. A fixed B or a complex A can be written with adjcomp.ops.linear_scan"
        )
    groups = B.shape[1] if B.dim() == 4 else 1
    size = A.shape[0] // groups

    def part(t: Tensor | None, g: int, dim: int) -> Tensor | None:
        return t if t is None or groups == 1 else t.narrow(dim, g * size, size)

    made = []
    for g in range(groups):
        B_bnl, C_bnl = (B[:, g], C[:, g]) if B.dim() == 4 else (B, C)
        x, dt, gate = part(x_bdl, g, 1), part(dt_bdl, g, 1), part(z, g, 1)
        made.append(
            ops.selective_scan(
                x.transpose(1, 2),  # type: ignore[union-attr]
                dt.transpose(1, 2),  # type: ignore[union-attr]
                part(A, g, 0),  # type: ignore[arg-type]
                B_bnl.transpose(1, 2),
                C_bnl.transpose(1, 2),
                part(D, g, 0),
                None if gate is None else gate.transpose(1, 2),
                dt_bias=part(delta_bias, g, 0),
                dt_softplus=delta_softplus,
            )
        )
    y = made[0][0] if groups == 1 else torch.cat([y for y, _ in made], 2)
    last = made[0][1] if groups == 1 else torch.cat([last for _, last in made], 1)
    return (y.transpose(1, 2), last) if return_last_state else y.transpose(1, 2)


def causal_conv1d(
    x_bdl: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """`causal_conv1d_fn`: channels before time."""
    refuse_packing("causal_conv1d_fn", options)
    for name in ("initial_states", "return_final_states", "final_states_out"):
        if options.get(name) not in (None, False):
            raise CaptureError(f"causal_conv1d_fn with {name}: call adjcomp.ops.causal_conv1d, which takes a tail and returns it")
    if activation not in (None, "silu", "swish"):
        raise CaptureError(f"causal_conv1d_fn with activation {activation!r}: supported are None, 'silu' and 'swish'")
    y, _ = ops.causal_conv1d(x_bdl.transpose(1, 2), weight, bias, activation="silu" if activation else None)
    return y.transpose(1, 2)


def mamba_inner(
    xz_bdl: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """`mamba_inner_fn`: all of a Mamba-1 mixer after its first projection."""
    if B is not None or C is not None:
        raise CaptureError("mamba_inner_fn with a B or C of its own: supported are those that x_proj makes")
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    x_bdl, z_bdl = xz_bdl.chunk(2, dim=1)
    x = causal_conv1d(x_bdl, conv1d_weight.squeeze(1), conv1d_bias, "silu").transpose(1, 2)
    dt, B_bln, C_bln = functional.linear(x, x_proj_weight).split([rank, states, states], dim=-1)
    dt = functional.linear(dt, delta_proj_weight)
    B_bln = B_bln if B_proj_bias is None else B_bln + B_proj_bias.to(B_bln.dtype)
    C_bln = C_bln if C_proj_bias is None else C_bln + C_proj_bias.to(C_bln.dtype)
    normed = [
        t if weight is None else rms_norm(t, weight, None, eps=b_c_dt_rms_eps)
        for t, weight in ((dt, dt_rms_weight), (B_bln, b_rms_weight), (C_bln, c_rms_weight))
    ]
    z = z_bdl.transpose(1, 2)
    y, _ = ops.selective_scan(x, normed[0], A, normed[1], normed[2], D, z, dt_bias=delta_bias, dt_softplus=delta_softplus)
    return functional.linear(y, out_proj_weight, out_proj_bias)


def chunk_scan(
    x_blhp: Tensor,
    dt_blh: Tensor,
    A: Tensor,
    B_blgn: Tensor,
    C_blgn: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_chunk_scan_combined`; its chunk_size and state_dtype are knobs of that kernel. D: (h,) or (h, p)."""
    refuse_packing("mamba_chunk_scan_combined", options)
    limit = None if tuple(dt_limit) == NO_LIMIT else (float(dt_limit[0]), float(dt_limit[1]))
    dt_options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": limit}
    if D is None or D.dim() == 1:
        y, last = ops.ssd(x_blhp, dt_blh, A, B_blgn, C_blgn, D, z, initial_states, **dt_options)
    else:  # a skip of its own for every channel of a head
        y, last = ops.ssd(x_blhp, dt_blh, A, B_blgn, C_blgn, None, None, initial_states, **dt_options)
        y = y + (x_blhp * D).to(y.dtype)
        y = y if z is None else y * functional.silu(z)
    return (y, last) if return_final_states else y


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_split_conv1d_scan_combined`: a Mamba-2 mixer after its first projection; channels beside the heads are an MLP."""
    refuse_packing("mamba_split_conv1d_scan_combined", {"seq_idx": seq_idx})
    heads = D.shape[0]
    width = D.shape[1] if D.dim() == 2 else int(headdim or 0)
    inner, batch, steps = heads * width, zxbcdt.shape[0], zxbcdt.shape[1]
    states = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    beside = (zxbcdt.shape[-1] - 2 * inner - 2 * ngroups * states - heads) // 2
    gate, value, z, xbc, dt = zxbcdt.split([beside, beside, inner, inner + 2 * ngroups * states, heads], dim=-1)
    xbc = causal_conv1d(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, activation).transpose(1, 2)
    x, B, C = xbc.split([inner, ngroups * states, ngroups * states], dim=-1)
    B, C = (t.reshape(batch, steps, ngroups, states) for t in (B, C))
    fused_gate = z.reshape(batch, steps, heads, width) if rmsnorm_weight is None else None
    scan = (x.reshape(batch, steps, heads, width), dt, A, B, C, chunk_size, D, fused_gate, dt_bias, initial_states)
    y_blhp, last = chunk_scan(*scan, dt_softplus=True, dt_limit=dt_limit, return_final_states=True)
    y = y_blhp.reshape(batch, steps, inner)
    if rmsnorm_weight is not None:
        y = gated_rms_norm(y, rmsnorm_weight, None, z, rmsnorm_eps, inner // ngroups, norm_before_gate)
    if beside > 0:
        y = torch.cat([functional.silu(gate) * value, y], dim=-1)
    y = y if outproj_weight is None else functional.linear(y, outproj_weight, outproj_bias)
    return (y, last) if return_final_states else y


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *parallel: Tensor | None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm_fn` of mamba_ssm: x + residual, normalised in float32; with `prenorm` the sum comes out too."""
    asked = [name for name, value in options.items() if value not in (None, False)]
    if asked or any(p is not None for p in parallel):
        raise CaptureError(
            f"layer_norm_fn with {', '.join(asked) or 'a second input'}: supported are residual, dropout_p, prenorm"
        )
    x_dtype = x.dtype
    kept = residual.dtype if residual is not None else (torch.float32 if residual_in_fp32 else x_dtype)
    total = functional.dropout(x, dropout_p).float()
    total = total if residual is None else total + residual.float()
    if is_rms_norm:
        y = ops.rms_norm(total, weight.float(), eps)
        y = y if bias is None else y + bias.float()
    else:
        y = functional.layer_norm(total, (weight.shape[0],), weight.float(), None if bias is None else bias.float(), eps)
    return (y.to(x_dtype), total.to(kept)) if prenorm else y.to(x_dtype)


def rms_norm(*args: Any, **kwargs: Any) -> Any:
    """`rms_norm_fn` of mamba_ssm."""
    return layer_norm(*args, **kwargs, is_rms_norm=True)


def gated_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """`layernorm_fn` of mamba_ssm's gated norms: norm(x) · silu(z), or norm(x · silu(z)), over groups of channels, in float32."""
    wide = x.float()
    gate = None if z is None else functional.silu(z.float())
    wide = wide if gate is None or norm_before_gate else wide * gate
    size = group_size or x.shape[-1]
    groups = wide.reshape(*wide.shape[:-1], x.shape[-1] // size, size)
    normed = ops.rms_norm(groups, None, eps) if is_rms_norm else functional.layer_norm(groups, (size,), None, None, eps)
    y = normed.reshape(x.shape) * weight.float()
    y = y if bias is None else y + bias.float()
    return (y * gate if gate is not None and norm_before_gate else y).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`rmsnorm_fn` of mamba_ssm's gated norms."""
    return gated_layer_norm(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)


# Module and function -> what stands for it.
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"): selective_scan,
    ("mamba_ssm.ops.selective_scan_interface", "mamba_inner_fn"): mamba_inner,
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"): chunk_scan,
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined"): split_conv1d_scan,
    ("mamba_ssm.ops.triton.layer_norm", "layer_norm_fn"): layer_norm,
    ("mamba_ssm.ops.triton.layer_norm", "rms_norm_fn"): rms_norm,
    ("mamba_ssm.ops.triton.layernorm_gated", "layernorm_fn"): gated_layer_norm,
    ("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn"): gated_rms_norm,
    ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn"): causal_conv1d,
}
