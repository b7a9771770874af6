"""Windowed VJPs of `linear_scan` and `dense_scan`. Legend: see `blocks`; F flat state, N states of a dense recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.windowed.blocks import Blocks, diagonal_adjoint, handed_on, slices, steps_after


def _conj(t: Tensor) -> Tensor:
    return t.conj() if t.is_complex() else t


def _before(h: Tensor, h0: Tensor | None) -> Tensor:
    """h[t-1] for every t."""
    start = torch.zeros_like(h[:, :1]) if h0 is None else h0.reshape(h[:, :1].shape).to(h.dtype)
    return torch.cat([start, h[:, :-1]], 1)


def linear_scan_window_vjp(
    dh: Tensor | None, adjoint: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, mask: Mask, window: int
) -> tuple[Tensor | None, ...]:
    """Cotangents of a and b, and what the chunk before needs."""
    wide = state_dtype(a, h, h0)
    batch, steps = h.shape[:2]
    a_blf, h_blf = a.reshape(batch, steps, -1).to(wide), h.reshape(batch, steps, -1).to(wide)
    g_blf = torch.zeros_like(h_blf) if dh is None else dh.reshape(batch, steps, -1).to(wide)
    size = h_blf.shape[2]
    after = steps_after(adjoint, size, 2 * size, window)
    lam = torch.empty_like(h_blf)
    for part in slices(size, batch * (steps + window)):
        decays = torch.cat([a_blf[:, :, part], after[:, :, :size][:, :, part]], 1)
        cotangents = torch.cat([g_blf[:, :, part], after[:, :, size:][:, :, part]], 1)
        lam[:, :, part] = diagonal_adjoint(decays, cotangents, steps, window)
    da = (lam * _conj(_before(h_blf, h0))).view(a.shape).to(a.dtype) if mask[0] else None
    db = lam.view(h.shape).to(h.dtype) if mask[1] else None
    back = handed_on(_conj(a_blf[:, 0]) * lam[:, 0], torch.cat([a_blf, g_blf], 2), after)
    return da, db, back


def dense_scan_window_vjp(
    dh: Tensor | None, adjoint: Tensor, A: Tensor, h: Tensor, h0: Tensor | None, mask: Mask, window: int
) -> tuple[Tensor | None, ...]:
    """Cotangents of A and b, and what the chunk before needs."""
    wide = state_dtype(A, h, h0)
    steps, size = h.shape[1:]
    A_blnn, h_bln = A.to(wide), h.to(wide)
    g_bln = torch.zeros_like(h_bln) if dh is None else dh.to(wide)
    after = steps_after(adjoint, size, size * size + size, window)
    matrices = torch.cat([A_blnn, after[:, :, : size * size].unflatten(2, (size, size))], 1)
    lam = dense_adjoint(matrices, torch.cat([g_bln, after[:, :, size * size :]], 1), steps, window)
    dA = (lam[..., None] * _conj(_before(h_bln, h0))[..., None, :]).to(A.dtype) if mask[0] else None
    db = lam.to(h.dtype).contiguous() if mask[1] else None
    dh0 = (_conj(A_blnn[:, 0]).mT @ lam[:, 0, :, None])[..., 0]
    return dA, db, handed_on(dh0, torch.cat([A_blnn.flatten(2), g_bln], 2), after)


def dense_adjoint(A_blnn: Tensor, g_bln: Tensor, steps: int, window: int) -> Tensor:
    """λ (b, L, N) from matrices and cotangents of L + W - 1 steps; all blocks of a chunk step by step at once."""
    blocks = Blocks(steps, window)
    own_A, own_g = blocks.own(A_blnn), blocks.own(g_bln)
    sums = _following_sums(blocks.following(A_blnn), blocks.following(g_bln))
    identity = torch.eye(A_blnn.shape[-1], dtype=A_blnn.dtype, device=A_blnn.device)
    reach = identity.expand(*own_A.shape[:2], *identity.shape)
    inside = own_g[:, :, -1]
    found: list[Tensor] = []
    for r in range(blocks.length - 1, -1, -1):
        if r < blocks.length - 1:
            inside = own_g[:, :, r] + (_conj(own_A[:, :, r + 1]).mT @ inside[..., None])[..., 0]
            reach = reach @ own_A[:, :, r + 1]
        beyond = r + window - 1 - blocks.length  # the last of the following steps that the window holds
        found.append(inside if beyond < 0 else inside + (_conj(reach).mT @ sums[beyond][..., None])[..., 0])
    return blocks.joined(torch.stack(found[::-1], 2))


def _following_sums(A_bswnn: Tensor, g_bswn: Tensor) -> list[Tensor]:
    """R[t] for every step t after the blocks."""
    sums: list[Tensor] = []
    reach: Tensor | None = None
    for t in range(g_bswn.shape[2]):
        reach = A_bswnn[:, :, t] if reach is None else A_bswnn[:, :, t] @ reach
        term = (_conj(reach).mT @ g_bswn[:, :, t, :, None])[..., 0]
        sums.append(sums[-1] + term if sums else term)
    return sums
