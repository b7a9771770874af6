"""Torch forms of `linear_scan` and `dense_scan`: one fused multiply-add per step, nothing of size T beside inputs and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask


def _conj(t: Tensor) -> Tensor:
    return t.conj() if t.is_complex() else t


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.linear_scan`; a, b: (B, T, *S)."""
    wide = state_dtype(a, b, h0)
    h = b.new_zeros((b.shape[0], *b.shape[2:]), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    out = torch.empty(b.shape, dtype=torch.promote_types(a.dtype, b.dtype), device=b.device)
    for t in range(b.shape[1]):
        h = torch.addcmul(b[:, t].to(wide), a[:, t].to(wide), h)
        out[:, t] = h
    return out, h


def linear_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, a: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """λ[t] = dh[t] + conj(a[t+1]) λ[t+1];  da[t] = λ[t] conj(h[t-1]),  db = λ,  dh0 = conj(a[0]) λ[0]."""
    wide = state_dtype(a, h, h0)
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device) if mask[0] else None
    db = torch.empty(h.shape, dtype=h.dtype, device=h.device) if mask[1] else None
    carry = h.new_zeros((h.shape[0], *h.shape[2:]), dtype=wide) if dh_last is None else dh_last.to(wide)
    for t in reversed(range(h.shape[1])):
        lam = carry if dh is None else carry + dh[:, t].to(wide)
        if db is not None:
            db[:, t] = lam
        if da is not None:
            before = h[:, t - 1] if t > 0 else h0
            da[:, t] = 0 if before is None else lam * _conj(before.to(wide))
        carry = lam * _conj(a[:, t].to(wide))
    return da, db, carry.to(h0.dtype) if mask[2] and h0 is not None else None


def dense_scan(A: Tensor, b: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.dense_scan`; A: (B, T, N, N), b: (B, T, N)."""
    wide = state_dtype(A, b, h0)
    h = b.new_zeros((b.shape[0], b.shape[2]), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    out = torch.empty(b.shape, dtype=torch.promote_types(A.dtype, b.dtype), device=b.device)
    for t in range(b.shape[1]):
        h = torch.baddbmm(b[:, t, :, None].to(wide), A[:, t].to(wide), h[..., None])[..., 0]
        out[:, t] = h
    return out, h


def dense_scan_vjp(
    dh: Tensor | None, dh_last: Tensor | None, A: Tensor, h: Tensor, h0: Tensor | None, mask: Mask
) -> tuple[Tensor | None, ...]:
    """λ[t] = dh[t] + A[t+1]ᴴ λ[t+1];  dA[t] = λ[t] h[t-1]ᴴ,  db = λ,  dh0 = A[0]ᴴ λ[0]."""
    wide = state_dtype(A, h, h0)
    dA = torch.empty(A.shape, dtype=A.dtype, device=A.device) if mask[0] else None
    db = torch.empty(h.shape, dtype=h.dtype, device=h.device) if mask[1] else None
    carry = h.new_zeros((h.shape[0], h.shape[2]), dtype=wide) if dh_last is None else dh_last.to(wide)
    for t in reversed(range(h.shape[1])):
        lam = carry if dh is None else carry + dh[:, t].to(wide)
        if db is not None:
            db[:, t] = lam
        if dA is not None:
            before = h[:, t - 1] if t > 0 else h0
            dA[:, t] = 0 if before is None else lam[:, :, None] * _conj(before.to(wide))[:, None, :]
        carry = torch.bmm(_conj(A[:, t].to(wide)).mT, lam[..., None])[..., 0]
    return dA, db, carry.to(h0.dtype) if mask[2] and h0 is not None else None
