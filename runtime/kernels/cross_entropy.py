"""The head with its cross-entropy, on any device: products on blocks of rows and vocabulary, an online log-sum-exp over them.
On a CPU what happens to a block of logits between products is one pass of C++.

Legend: r rows of a block (batch and time merged), v vocabulary entries of a block, d model channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.cpu import softmax_rows

BLOCK_BYTES = 4 << 20  # logits held at a time
BLOCK_ROWS = 1024  # rows that share one pass over the weight


def spans(total: int, size: int) -> Iterator[slice]:
    """0 … total in slices of `size`, the last one shorter."""
    return (slice(start, min(total, start + size)) for start in range(0, total, size))


def _vocabulary_block(rows: int, wide: torch.dtype) -> int:
    return max(64, BLOCK_BYTES // (wide.itemsize * max(1, rows)))


def _logits(x_rd: Tensor, weight_vd: Tensor, logits_dtype: torch.dtype | None) -> Tensor:
    """(r, v) in x_rd's dtype, rounded through `logits_dtype` where it is narrower."""
    logits = x_rd @ weight_vd.to(x_rd.dtype).T
    return logits if logits_dtype is None else logits.to(logits_dtype).to(x_rd.dtype)


def _check_labels(labels: Tensor, valid: Tensor, size: int) -> None:
    """torch's error for a label outside the vocabulary."""
    outside = valid & ((labels < 0) | (labels >= size))
    if bool(outside.any()):
        raise IndexError(f"adjcomp.ops.linear_cross_entropy: Target {int(labels[outside][0])} is out of bounds: [0, {size})")


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, logits_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, number of valid rows, and the log-sum-exp of each row's logits, (B, T)."""
    wide = state_dtype(x, weight)
    rows, flat = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long()
    valid = flat != ignore_index
    _check_labels(flat, valid, weight.shape[0])
    total = torch.full(flat.shape, -torch.inf, dtype=wide, device=x.device)
    picked = torch.zeros_like(total)
    for span in spans(rows.shape[0], BLOCK_ROWS):
        _row_block(rows[span].to(wide), weight, flat[span], logits_dtype, total[span], picked[span])
    normaliser = torch.where(total == torch.inf, torch.nan, total)  # what log_softmax gives for a logit of inf
    loss = torch.where(valid, normaliser - picked, 0.0).sum(dtype=torch.float64)
    return loss.to(wide), valid.sum(), normaliser.view(labels.shape)


def _row_block(
    x_rd: Tensor, weight: Tensor, labels_r: Tensor, logits_dtype: torch.dtype | None, total_r: Tensor, picked_r: Tensor
) -> None:
    """Writes the log-sum-exp and the label's logit of each row; `total_r` starts at -inf."""
    for span in spans(weight.shape[0], _vocabulary_block(x_rd.shape[0], x_rd.dtype)):
        _join(_logits(x_rd, weight[span], logits_dtype), labels_r, span.start, total_r, picked_r)


def _join(logits: Tensor, labels_r: Tensor, start: int, total_r: Tensor, picked_r: Tensor) -> None:
    """Joins a block of logits to the log-sum-exp and the label's logit of each row."""
    if softmax_rows.is_native(logits):
        softmax_rows.join(logits, labels_r, start, total_r, picked_r)
        return
    total_r.copy_(torch.logaddexp(total_r, torch.logsumexp(logits, 1)))
    inside, index = _in_block(logits, labels_r, start)
    picked_r.copy_(torch.where(inside, logits.gather(1, index)[:, 0], picked_r))


def _in_block(logits: Tensor, labels_r: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Whether a block holds each label, (r), and where, (r, 1); anywhere if it doesn't."""
    inside = (labels_r >= start) & (labels_r < start + logits.shape[1])
    return inside, (labels_r - start).clamp(0, logits.shape[1] - 1)[:, None]


def linear_cross_entropy_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    ignore_index: int,
    logits_dtype: torch.dtype | None,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Cotangents of x and weight."""
    dweight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=x.device) if mask[1] else None
    dx = _vjp(dloss, x, weight, labels, normaliser, ignore_index, logits_dtype, mask[0], dweight)
    return dx, None if dweight is None else dweight.to(weight.dtype)


def linear_cross_entropy_add_vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    ignore_index: int,
    logits_dtype: torch.dtype | None,
    wants_dx: bool,
    dweight: Tensor,
) -> Tensor:
    """The cotangent of x, empty where it isn't wanted; that of weight is added to `dweight`, in the dtype of the arithmetic."""
    dx = _vjp(dloss, x, weight, labels, normaliser, ignore_index, logits_dtype, wants_dx, dweight)
    return x.new_empty(0) if dx is None else dx


def _vjp(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    ignore_index: int,
    logits_dtype: torch.dtype | None,
    wants_dx: bool,
    dweight: Tensor | None,
) -> Tensor | None:
    """Recomputes each block of logits: dlogits = (softmax - onehot) dloss on valid rows."""
    wide = normaliser.dtype
    rows, flat, norm = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long(), normaliser.reshape(-1)
    scale = torch.where(flat != ignore_index, dloss.to(wide), 0.0)
    dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if wants_dx else None
    for span in spans(rows.shape[0], BLOCK_ROWS):
        x_rd = rows[span].to(wide)
        dx_rd = None if dx is None else (dx[span] if dx.dtype == wide else torch.empty_like(x_rd))
        _row_block_vjp(x_rd, weight, flat[span], norm[span], scale[span], logits_dtype, dx_rd, dweight)
        if dx is not None and dx_rd is not None and dx.dtype != wide:
            dx[span] = dx_rd
    return None if dx is None else dx.view(x.shape)


def _row_block_vjp(
    x_rd: Tensor,
    weight: Tensor,
    labels_r: Tensor,
    norm_r: Tensor,
    scale_r: Tensor,
    logits_dtype: torch.dtype | None,
    dx_rd: Tensor | None,
    dweight: Tensor | None,
) -> None:
    """Writes one block of rows of `dx_rd` (r, d), and adds its share to `dweight` (V, d)."""
    for span in spans(weight.shape[0], _vocabulary_block(x_rd.shape[0], x_rd.dtype)):
        dlogits = _logits(x_rd, weight[span], logits_dtype)
        _softmax_vjp(dlogits, labels_r, span.start, norm_r, scale_r)
        if dx_rd is not None:
            torch.addmm(dx_rd, dlogits, weight[span].to(x_rd.dtype), beta=int(span.start > 0), out=dx_rd)
        if dweight is not None:
            dweight[span].addmm_(dlogits.T, x_rd)


def _softmax_vjp(logits: Tensor, labels_r: Tensor, start: int, norm_r: Tensor, scale_r: Tensor) -> None:
    """Turns a block of logits into their cotangent, in place."""
    if softmax_rows.is_native(logits):
        softmax_rows.vjp(logits, labels_r, start, norm_r, scale_r)
        return
    logits.sub_(norm_r[:, None]).exp_().mul_(scale_r[:, None])
    inside, index = _in_block(logits, labels_r, start)
    logits.scatter_add_(1, index, torch.where(inside, -scale_r, 0.0)[:, None])
