"""`adjcomp::linear_cross_entropy` on a GPU: torch's products on blocks of rows and vocabulary, a kernel for each softmax.

The largest thing held is one block of logits. A label outside the vocabulary trips torch's assertion on the device, as
`torch.nn.functional.cross_entropy` does there: asking would make the host wait in every chunk.

Legend: r rows of a block (batch and time merged), v vocabulary entries of a block, d model channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjcomp.runtime.kernels import cross_entropy
from adjcomp.runtime.kernels.arithmetic import Mask
from adjcomp.runtime.kernels.triton.configs import choose
from adjcomp.runtime.kernels.triton.functions import slot
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide

BLOCK_BYTES = 64 << 20  # logits held at a time, in float32
BLOCK_ROWS = 4096  # rows that share one pass over the weight
HALVES = (torch.bfloat16, torch.float16)


@triton.jit
def cross_entropy_rows(logits, labels, most, total, picked, start, size, logits_r, BLOCK_V: tl.constexpr):
    """Join a block of logits (r, v), vocabulary start …, to each row's maximum, sum of exp(logit - maximum) and label's logit.

    Bytes: the logits once. A maximum of -inf stands for 0 inside exponentials, so that a block without finite logits adds 0.
    """
    r = tl.program_id(0).to(tl.int64)
    high = tl.load(most + r)
    held = tl.load(total + r)
    label = tl.load(labels + r)
    for first in range(0, size, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        values = tl.load(slot(logits, r, 0, 1, logits_r) + v, mask=v < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(values, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        held = held * tl.exp(high - base) + tl.sum(tl.exp(values - base), 0)
        high = higher
    tl.store(most + r, high)
    tl.store(total + r, held)
    inside = (label >= start) & (label < start + size)
    value = tl.load(slot(logits, r, 0, 1, logits_r) + (label - start), mask=inside, other=0.0).to(tl.float32)
    tl.store(picked + r, value, mask=inside)


@triton.jit
def cross_entropy_vjp(logits, labels, norm, scale, out, start, size, logits_r, out_r, BLOCK_V: tl.constexpr):
    """out (r, v) = (exp(logit - norm) - [v is the label]) scale of a block of logits. Bytes: logits and out once."""
    r = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    values = tl.load(slot(logits, r, 0, 1, logits_r) + v, mask=v < size, other=0.0).to(tl.float32)
    values = tl.exp(values - tl.load(norm + r))
    values = tl.where(v == tl.load(labels + r) - start, values - 1.0, values)
    factor = tl.load(scale + r)
    values = tl.where(factor == 0.0, 0.0, values * factor)  # a row that doesn't count stays 0, whatever its logits
    tl.store(slot(out, r, 0, 1, out_r) + v, values.to(out.dtype.element_ty), mask=v < size)


@dataclass(frozen=True)
class _Rows:
    """Rows and weight in the number type that they are multiplied in, and that of the logits."""

    x_rd: Tensor
    weight: Tensor
    labels: Tensor
    logits_dtype: torch.dtype

    @staticmethod
    def of(x: Tensor, weight: Tensor, labels: Tensor, logits_dtype: torch.dtype | None) -> _Rows:
        half = x.dtype == weight.dtype and x.dtype in HALVES and x.device.type != "cpu"
        rows = x.reshape(-1, x.shape[-1])
        wide = torch.float32 if logits_dtype is None or logits_dtype not in HALVES else logits_dtype
        if half:
            return _Rows(rows, weight, labels.reshape(-1), wide)
        return _Rows(rows.float(), weight.float(), labels.reshape(-1), wide)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Spans of rows and of vocabulary, the latter faster."""
        size = min(BLOCK_ROWS, max(1, self.x_rd.shape[0]))
        for rows in cross_entropy.spans(self.x_rd.shape[0], size):
            for words in cross_entropy.spans(self.weight.shape[0], max(128, BLOCK_BYTES // (4 * size))):
                yield rows, words

    def logits(self, rows: slice, words: slice) -> Tensor:
        """(r, v), rounded to the dtype that is asked for."""
        left, right = self.x_rd[rows], self.weight[words].T
        if self.logits_dtype == left.dtype:
            return left @ right
        return wide_product(left, right).to(self.logits_dtype)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A product in float32; half precision factors are not widened where the device can do without."""
    if left.dtype in HALVES and left.device.type == "cuda" and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, logits_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, number of valid rows, and the log-sum-exp of each row's logits, (B, T)."""
    if is_wide(x, weight) or logits_dtype == torch.float64:
        return cross_entropy.linear_cross_entropy(x, weight, labels, ignore_index, logits_dtype)
    call = _Rows.of(x, weight, labels, logits_dtype)
    valid = call.labels != ignore_index
    known = ~valid | ((call.labels >= 0) & (call.labels < weight.shape[0]))
    torch._assert_async(known.all(), f"adjcomp.ops.linear_cross_entropy: a label is outside [0, {weight.shape[0]})")
    most = torch.full(call.labels.shape, -torch.inf, dtype=torch.float32, device=x.device)
    total, picked = torch.zeros_like(most), torch.zeros_like(most)
    config = choose("cross_entropy_rows", x.device)
    for rows, words in call.blocks():
        logits = call.logits(rows, words)
        sums = {"most": most[rows], "total": total[rows], "picked": picked[rows], "labels": call.labels[rows]}
        sizes = {"start": words.start, "size": logits.shape[1], "logits_r": logits.stride(0)}
        launch(cross_entropy_rows, (logits.shape[0],), {"logits": logits, **sums, **sizes}, config)
    normaliser = most + torch.log(total)
    normaliser = torch.where(normaliser == torch.inf, torch.nan, normaliser)  # what log_softmax gives for a logit of inf
    loss = torch.where(valid, normaliser - picked, 0.0).sum(dtype=torch.float64).float()
    return loss, valid.sum(), normaliser.view(labels.shape)


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
    """Recomputes each block of logits; sums over blocks are float32."""
    if is_wide(normaliser) or logits_dtype == torch.float64:
        return cross_entropy.linear_cross_entropy_vjp(dloss, x, weight, labels, normaliser, ignore_index, logits_dtype, mask)
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if mask[1] else None
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
    """The cotangent of x, empty where it isn't wanted; that of weight is added to `dweight`, float32."""
    given = (dloss, x, weight, labels, normaliser, ignore_index, logits_dtype, wants_dx, dweight)
    if is_wide(normaliser, dweight) or logits_dtype == torch.float64:
        return cross_entropy.linear_cross_entropy_add_vjp(*given)
    dx = _vjp(*given)
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
    call = _Rows.of(x, weight, labels, logits_dtype)
    scale = torch.where(call.labels != ignore_index, dloss.float(), 0.0)
    norm, config = normaliser.reshape(-1), choose("cross_entropy_vjp", x.device)
    dx = torch.zeros(call.x_rd.shape, dtype=torch.float32, device=x.device) if wants_dx else None
    for rows, words in call.blocks():
        logits = call.logits(rows, words)
        dlogits = torch.empty(logits.shape, dtype=call.x_rd.dtype, device=x.device)
        sums = {"labels": call.labels[rows], "norm": norm[rows], "scale": scale[rows]}
        sizes = {"start": words.start, "size": logits.shape[1], "logits_r": logits.stride(0), "out_r": dlogits.stride(0)}
        grid = (logits.shape[0], -(-logits.shape[1] // config.constants["BLOCK_V"]))
        launch(cross_entropy_vjp, grid, {"logits": logits, "out": dlogits, **sums, **sizes}, config)
        if dx is not None:
            dx[rows] += wide_product(dlogits, call.weight[words])
        if dweight is not None:
            dweight[words] += wide_product(dlogits.T, call.x_rd[rows])
    return None if dx is None else dx.to(x.dtype).view(x.shape)
