"""`adjcomp::causal_attention` on any device: parts of the keys one after the other, joined by the log-sum-exp of their scores.

Earlier keys are one part (or a few, where they are converted), seen whole by every query; the chunk's own keys are another, under
a triangle. Given the joined output and normaliser, the VJP of each part alone is exact. Under a window, blocks of queries see one
band of keys each. A CPU runs torch's fused kernel on every part; elsewhere a block of scores exists at a time.

Legend: b batch, t queries, s keys, h heads of queries, g of keys, e channels (of queries, keys and values, padded to be equal).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from adjcomp.ops.library import state_dtype
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like

aten = torch.ops.aten
KEY_BLOCK = 4096  # earlier keys that are converted at a time, or that have scores at a time
QUERY_BLOCK = 512  # queries that see one band of keys under a window
BLOCK_SCORES = 1 << 21  # scores held at a time, or those of one query, where there is no fused kernel
Part = tuple[Tensor, Tensor]  # keys and values, (b, s, g, ·)


@dataclass(frozen=True)
class _Form:
    """The dtype and width of the arithmetic, and the factor of the scores."""

    dtype: torch.dtype
    width: int
    scale: float

    def heads_first(self, x_bthd: Tensor) -> Tensor:
        """(b, h, t, e): a view where dtype and width fit."""
        missing = self.width - x_bthd.shape[3]
        wide = x_bthd.to(self.dtype)
        return (functional.pad(wide, (0, missing)) if missing else wide).transpose(1, 2)

    def is_of(self, tensor: Tensor) -> bool:
        return tensor.dtype is self.dtype and tensor.shape[3] == self.width


def _form(q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Form:
    return _Form(state_dtype(q, k, v), max(q.shape[3], v.shape[3]), scale)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, past_k: Tensor | None, past_v: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """See `adjcomp.ops.causal_attention`; also the log-sum-exp of each query's scores, (b, t, h)."""
    form, past = _form(q, k, v, scale), _past(past_k, past_v)
    queries = form.heads_first(q)
    if _is_narrow(window, k, past):
        found = [_attend(form, queries[:, :, rows], *band, mask) for rows, band, mask in _bands(form, (k, v), past, window)]
        out, norm = torch.cat([o for o, _ in found], 2), torch.cat([n for _, n in found], 2)
    else:
        out, norm = _attend(form, queries, form.heads_first(k), form.heads_first(v), None, causal=True)
        for keys, values in _blocks(form, past):
            out, norm = _join(out, norm, *_attend(form, queries, form.heads_first(keys), form.heads_first(values), None))
    y = out.transpose(1, 2)[..., : v.shape[3]]
    return y.to(q.dtype).contiguous(), norm.transpose(1, 2).contiguous()


def _past(past_k: Tensor | None, past_v: Tensor | None) -> Part | None:
    return None if past_k is None or past_v is None or past_k.shape[1] == 0 else (past_k, past_v)


def _is_narrow(window: int | None, k: Tensor, past: Part | None) -> bool:
    """Whether a window hides any key."""
    return window is not None and window < k.shape[1] + (0 if past is None else past[0].shape[1])


def _blocks(form: _Form, past: Part | None) -> Iterator[Part]:
    """Earlier keys and values: whole where a fused kernel takes them as they are."""
    if past is None:
        return
    whole = _has_fused(past[0]) and form.is_of(past[0]) and form.is_of(past[1])
    size = past[0].shape[1] if whole else KEY_BLOCK
    yield from zip(past[0].split(size, 1), past[1].split(size, 1), strict=True)


def _join(out: Tensor, norm: Tensor, part: Tensor, part_norm: Tensor) -> tuple[Tensor, Tensor]:
    """The output over two parts of the keys, and its normaliser."""
    joined = torch.logaddexp(norm, part_norm)
    out = out.mul_((norm - joined).exp_()[..., None]).addcmul_(part, (part_norm - joined).exp_()[..., None])
    return out, joined


def _bands(form: _Form, own: Part, past: Part | None, window: int | None) -> Iterator[tuple[slice, Part, Tensor]]:
    """Blocks of queries with the keys and values that they see, (b, g, s, e), and which of those each sees, (t, s)."""
    assert window is not None
    before = 0 if past is None else past[0].shape[1]
    for rows, first in _reach(own[0].shape[1], before, window):
        keys, values = (form.heads_first(_steps(p, o, first, before + rows.stop)) for p, o in _pairs(past, own))
        t = torch.arange(before + rows.start, before + rows.stop, device=keys.device)[:, None]
        s = torch.arange(first, before + rows.stop, device=keys.device)
        yield rows, (keys, values), (s <= t) & (s > t - window)


def _reach(steps: int, before: int, window: int) -> Iterator[tuple[slice, int]]:
    """Blocks of queries, and the first key that each sees."""
    for start in range(0, steps, QUERY_BLOCK):
        yield slice(start, min(start + QUERY_BLOCK, steps)), max(0, before + start - window + 1)


def _pairs(past: Part | None, own: Part) -> list[tuple[Tensor | None, Tensor]]:
    return [(None if past is None else past[i], own[i]) for i in (0, 1)]


def _steps(past: Tensor | None, own: Tensor, first: int, stop: int) -> Tensor:
    """Steps `first` … `stop` - 1 of what was before, followed by the chunk's own."""
    before = 0 if past is None else past.shape[1]
    inside = own[:, max(0, first - before) : stop - before]
    return inside if past is None or first >= before else torch.cat([past[:, first:], inside], 1)


def _attend(
    form: _Form, q_bhte: Tensor, k_bgse: Tensor, v_bgse: Tensor, mask_ts: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention to one part of the keys: the output, (b, h, t, e), and its normaliser, (b, h, t). causal: a triangle."""
    if _has_fused(q_bhte):
        mask = None if mask_ts is None else _additive(mask_ts, form.dtype)
        out, norm = aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhte, k_bgse, v_bgse, 0.0, causal, attn_mask=mask, scale=form.scale
        )
        return out, norm
    outs, norms = [], []
    for rows, seen in _rows(q_bhte, k_bgse, mask_ts, causal):
        scores = _scores(form, q_bhte[:, :, rows], k_bgse, seen)
        norms.append(scores.logsumexp(-1).flatten(1, 2))
        outs.append((scores.softmax(-1) @ v_bgse[:, :, None]).flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(norms, 2)


def _has_fused(tensor: Tensor) -> bool:
    """Whether torch has a kernel for the tensor's device that gives out normalisers and takes them back."""
    return tensor.device.type == "cpu"


def _additive(mask_ts: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask_ts.shape, dtype=dtype, device=mask_ts.device).masked_fill_(~mask_ts, -torch.inf)


def _rows(q_bhte: Tensor, k_bgse: Tensor, mask_ts: Tensor | None, causal: bool) -> Iterator[tuple[slice, Tensor | None]]:
    """Blocks of queries, and which keys each of their queries sees (None: all)."""
    batch, heads, steps, _ = q_bhte.shape
    size = max(1, BLOCK_SCORES // (batch * heads * k_bgse.shape[2]))
    for start in range(0, steps, size):
        rows = slice(start, min(start + size, steps))
        if causal:
            whole = torch.ones(rows.stop - start, k_bgse.shape[2], dtype=torch.bool, device=q_bhte.device)
            yield rows, whole.tril(start)
        else:
            yield rows, None if mask_ts is None else mask_ts[rows]


def _grouped(x_bhte: Tensor, k_bgse: Tensor) -> Tensor:
    """(b, g, h / g, t, e)."""
    groups = k_bgse.shape[1]
    return x_bhte.view(x_bhte.shape[0], groups, x_bhte.shape[1] // groups, *x_bhte.shape[2:])


def _scores(form: _Form, q_bhte: Tensor, k_bgse: Tensor, seen: Tensor | None) -> Tensor:
    """(b, g, h / g, t, s), -inf where a key is hidden."""
    scores: Tensor = (_grouped(q_bhte, k_bgse) @ k_bgse[:, :, None].mT).mul_(form.scale)
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class _Sent:
    """What comes back to a call: its queries, output, normaliser, and the cotangent of the output, heads first."""

    form: _Form
    q: Tensor
    dy: Tensor
    y: Tensor
    norm: Tensor

    def part(self, keys: Tensor, values: Tensor, mask_ts: Tensor | None, rows: slice, *, causal: bool = False) -> list[Tensor]:
        """Cotangents of the queries `rows` and of the keys and values of one part, (b, h, t, e) and (b, g, s, e)."""
        q, dy, y, norm = (x[:, :, rows] for x in (self.q, self.dy, self.y, self.norm))
        if _has_fused(q):
            mask = None if mask_ts is None else _additive(mask_ts, self.form.dtype)
            return list(
                aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    dy, q, keys, values, y, norm, 0.0, causal, attn_mask=mask, scale=self.form.scale
                )
            )
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for block, seen in _rows(q, keys, mask_ts, causal):
            scores = _scores(self.form, q[:, :, block], keys, seen)
            p = scores.sub_(_grouped(norm[:, :, block], keys)[..., None]).exp_()
            given, queries = _grouped(dy[:, :, block], keys), _grouped(q[:, :, block], keys)
            delta = (given * _grouped(y[:, :, block], keys)).sum(-1, keepdim=True)
            dv += (p.mT @ given).sum(2)
            dscores = (given @ values[:, :, None].mT).sub_(delta).mul_(p).mul_(self.form.scale)
            dq[:, :, block] = (dscores @ keys[:, :, None]).flatten(1, 2)
            dk += (dscores.mT @ queries).sum(2)
        return [dq, dk, dv]


def causal_attention_vjp(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor | None,
    past_v: Tensor | None,
    y: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int | None,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """Cotangents of q, k, v, past_k and past_v."""
    wide = normaliser.dtype
    sums = [
        None if t is None or not keep else torch.zeros(t.shape, dtype=wide, device=t.device)
        for t, keep in zip((past_k, past_v), mask[3:], strict=True)
    ]
    grads = _vjp(dy, (q, k, v), _past(past_k, past_v), y, normaliser, scale, window, sums)
    return tuple(cast_like([*grads, *sums], [q, k, v, past_k, past_v], mask))


def causal_attention_add_vjp(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor,
    past_v: Tensor,
    y: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int | None,
    mask: Mask,
    dpast_k: Tensor | None,
    dpast_v: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Cotangents of q, k and v; those of earlier keys and values are added to `dpast_k` and `dpast_v`."""
    grads = _vjp(dy, (q, k, v), _past(past_k, past_v), y, normaliser, scale, window, [dpast_k, dpast_v])
    return tuple(cast_like(grads, [q, k, v], mask))


def _vjp(
    dy: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    past: Part | None,
    y: Tensor,
    normaliser: Tensor,
    scale: float,
    window: int | None,
    sums: list[Tensor | None],
) -> list[Tensor | None]:
    """Cotangents of q, k and v in the dtype of the arithmetic; adds to `sums` those of earlier keys and values."""
    q, k, v = given
    form = _form(q, k, v, scale)
    sent = _Sent(form, form.heads_first(q), form.heads_first(dy), form.heads_first(y), normaliser.transpose(1, 2))
    if _is_narrow(window, k, past):
        grads = _banded_vjp(sent, (k, v), past, window, sums)
    else:
        everything = slice(0, q.shape[1])
        grads = sent.part(form.heads_first(k), form.heads_first(v), None, everything, causal=True)
        start = 0
        for keys, values in _blocks(form, past):
            part = sent.part(form.heads_first(keys), form.heads_first(values), None, everything)
            grads[0] += part[0]
            _add(sums, part[1:], slice(start, start + keys.shape[1]))
            start += keys.shape[1]
    return [grad.transpose(1, 2)[..., : t.shape[3]] for grad, t in zip(grads, given, strict=True)]


def _banded_vjp(sent: _Sent, own: Part, past: Part | None, window: int | None, sums: list[Tensor | None]) -> list[Tensor]:
    """The same under a window, heads first."""
    before = 0 if past is None else past[0].shape[1]
    dq = torch.empty_like(sent.q)
    owned: list[Tensor | None] = [
        torch.zeros((*t.shape[:3], sent.form.width), dtype=sent.form.dtype, device=t.device) for t in own
    ]
    for rows, (keys, values), mask in _bands(sent.form, own, past, window):
        dq[:, :, rows], *parts = sent.part(keys, values, mask, rows)
        first = before + rows.stop - keys.shape[2]
        earlier = max(0, before - first)  # of the band's keys
        _add(sums, [part[:, :, :earlier] for part in parts], slice(first, first + earlier))
        _add(owned, [part[:, :, earlier:] for part in parts], slice(first + earlier - before, rows.stop))
    return [dq, *(found.transpose(1, 2) for found in owned if found is not None)]


def _add(sums: list[Tensor | None], parts: list[Tensor], steps: slice) -> None:
    """Add cotangents (b, g, s, e) to the steps `steps` of sums (b, ·, g, ·)."""
    for total, part in zip(sums, parts, strict=True):
        if total is not None:
            total[:, steps].add_(part.transpose(1, 2)[..., : total.shape[3]])
