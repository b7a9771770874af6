"""Chunked torch form of the selective scan: decays and states exist for one block of steps at a time.

Legend: b batch, t time, d channels, n states; s steps of a block (time first, so that the step loop reads whole slabs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.ops.selective import CHECKPOINT_STEPS
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like, silu_vjp, slot, step_size, step_size_vjp


@dataclass(frozen=True)
class _Block:
    """One block of steps: its inputs in the wide dtype, its decays and the states after each step."""

    x_bsd: Tensor
    delta_bsd: Tensor
    B_bsn: Tensor
    C_bsn: Tensor
    decay_sbdn: Tensor
    states_sbdn: Tensor


def _block(
    steps: slice, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor | None, softplus: bool, h: Tensor
) -> _Block:
    """Run one block from state `h` (b, d, n)."""
    wide = h.dtype
    x_bsd, dt_bsd, B_bsn, C_bsn = (t[:, steps].to(wide) for t in (x, dt, B, C))
    delta = step_size(dt_bsd, None if bias is None else bias.to(wide), softplus)
    decay = torch.exp(delta.transpose(0, 1)[..., None] * A.to(wide))
    states = (delta * x_bsd).transpose(0, 1)[..., None] * B_bsn.transpose(0, 1)[:, :, None, :]
    for s in range(states.shape[0]):
        h = states[s].addcmul_(decay[s], h)
    return _Block(x_bsd, delta, B_bsn, C_bsn, decay, states)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.selective_scan`; also returns the states before each block and after the last, (b, block, n, d)."""
    wide = state_dtype(x, dt, A, B, C, D, z, dt_bias, h0)
    batch, length, channels = x.shape
    h = x.new_zeros((batch, channels, A.shape[1]), dtype=wide) if h0 is None else h0.to(wide).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = [h]
    for start in range(0, length, CHECKPOINT_STEPS):
        steps = slice(start, min(length, start + CHECKPOINT_STEPS))
        block = _block(steps, x, dt, A, B, C, dt_bias, dt_softplus, h)
        out = torch.einsum("sbdn,bsn->bsd", block.states_sbdn, block.C_bsn)
        if D is not None:
            out = out + D.to(wide) * block.x_bsd
        y[:, steps] = out if z is None else out * torch.nn.functional.silu(z[:, steps].to(wide))
        h = block.states_sbdn[-1].clone()
        kept.append(h)
    return y, h.clone(memory_format=torch.contiguous_format), torch.stack(kept, 1).transpose(2, 3).contiguous()


def selective_scan_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    dt_softplus: bool,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Walks the blocks backwards; each is rebuilt from the state before it."""
    wide = states.dtype
    inputs = [x, dt, A, B, C, D, z, dt_bias]
    sums = [None if t is None else torch.zeros(t.shape, dtype=wide, device=x.device) for t in inputs]
    lam = torch.zeros_like(states[:, 0].mT) if dh_last is None else dh_last.to(wide)
    for index in reversed(range(states.shape[1] - 1)):
        steps = slice(index * CHECKPOINT_STEPS, min(x.shape[1], (index + 1) * CHECKPOINT_STEPS))
        before = states[:, index].mT
        block = _block(steps, x, dt, A, B, C, dt_bias, dt_softplus, before)
        lam = _block_vjp(block, steps, before, lam, dy, dt, A, D, z, dt_bias, dt_softplus, sums)
    grads = cast_like(sums, list(inputs), mask[:8])
    return (*grads, lam if mask[8] else None)


def _gate_vjp(block: _Block, dout: Tensor, D: Tensor | None, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the gate and of the output before it, (b, s, d)."""
    out = torch.einsum("sbdn,bsn->bsd", block.states_sbdn, block.C_bsn)
    out = out if D is None else out + D.to(out.dtype) * block.x_bsd
    return silu_vjp(dout * out, gate), dout * torch.nn.functional.silu(gate)


def _block_vjp(
    block: _Block,
    steps: slice,
    before: Tensor,
    lam: Tensor,
    dy: Tensor | None,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    sums: list[Tensor | None],
) -> Tensor:
    """Adds the block's cotangents to `sums` (x, dt, A, B, C, D, z, bias) and returns the adjoint state before it."""
    dx, ddt, dA, dB, dC = (slot(sums, i) for i in range(5))
    dD, dz, dbias = sums[5:]
    wide = lam.dtype
    x, delta = block.x_bsd, block.delta_bsd
    dout = torch.zeros_like(x) if dy is None else dy[:, steps].to(wide)
    if z is not None and dz is not None:
        dz[:, steps], dout = _gate_vjp(block, dout, D, z[:, steps].to(wide))
    adjoint = dout.transpose(0, 1)[..., None] * block.C_bsn.transpose(0, 1)[:, :, None, :]
    for s in reversed(range(adjoint.shape[0])):
        adjoint[s] += lam
        lam = adjoint[s] * block.decay_sbdn[s]
    previous = torch.cat([before[None], block.states_sbdn[:-1]])
    dlog = adjoint * previous * block.decay_sbdn  # cotangent of δ A
    dinput = torch.einsum("sbdn,bsn->bsd", adjoint, block.B_bsn)  # cotangent of δ x
    ddelta = torch.einsum("sbdn,dn->bsd", dlog, A.to(wide)) + x * dinput
    draw = step_size_vjp(ddelta, dt[:, steps].to(wide), None if bias is None else bias.to(wide), softplus)
    dx[:, steps] = delta * dinput if D is None else delta * dinput + D.to(wide) * dout
    ddt[:, steps] = draw
    dA += torch.einsum("sbdn,bsd->dn", dlog, delta)
    dB[:, steps] = torch.einsum("sbdn,bsd->bsn", adjoint, delta * x)
    dC[:, steps] = torch.einsum("sbdn,bsd->bsn", block.states_sbdn, dout)
    if dD is not None:
        dD += (dout * x).sum((0, 1))
    if dbias is not None:
        dbias += draw.sum((0, 1))
    return lam
