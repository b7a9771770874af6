"""`adjcomp::gated_delta_rule` on a GPU, its VJP, and the summaries of a range of time.

Long inputs are run in spans of SPAN_STEPS steps, which bounds the intermediates without costing parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adjcomp.ops.delta import CHECKPOINT_STEPS
from adjcomp.runtime.kernels import summaries
from adjcomp.runtime.kernels.arithmetic import Mask, cast_like
from adjcomp.runtime.kernels.cpu import chunked_delta
from adjcomp.runtime.kernels.triton import gated_delta_kernels as kernels
from adjcomp.runtime.kernels.triton import gated_delta_vjp_kernels as vjp_kernels
from adjcomp.runtime.kernels.triton.gated_delta_parts import (
    SUB,
    Call,
    Prepared,
    call_of,
    count_blocks,
    join,
    moves_of,
    multiply,
    outer,
    prepare,
)
from adjcomp.runtime.kernels.triton.launch import launch
from adjcomp.runtime.kernels.triton.tensors import is_wide, parameter, strides, timed

SPAN_STEPS = 64 * CHECKPOINT_STEPS


def _spans(steps: int) -> Iterator[slice]:
    return (slice(start, min(steps, start + SPAN_STEPS)) for start in range(0, steps, SPAN_STEPS))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `adjcomp.ops.gated_delta_rule`; also returns the states before chunks and after the last, (batch, chunk, H, K, V)."""
    if is_wide(q, k, v, g, beta, h0):
        return chunked_delta.gated_delta_rule(q, k, v, g, beta, h0)
    whole, state = call_of(q, k, v, g), parameter(h0)
    if whole.steps <= SPAN_STEPS:
        return _span(q, k, v, g, beta, state)
    y, states = v.new_empty(v.shape), whole.room(whole.chunks + 1, whole.heads, whole.keys, whole.values)
    for span in _spans(whole.steps):
        y[:, span], state, kept = _span(q[:, span], k[:, span], v[:, span], g[:, span], beta[:, span], state)
        first = span.start // CHECKPOINT_STEPS
        states[:, first : first + kept.shape[1]] = kept
    return y, states[:, -1].clone(), states


def _span(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The op on a span that starts with state `first`, float32."""
    call = call_of(q, k, v, g)
    made = prepare(call, q, k, v, g, beta)
    states = call.room(call.chunks + 1, call.heads, call.keys, call.values)
    outer(call, made.rows["k"], made.solved, made.sums, states, True, True)
    last = join(call, made.sums, made.moves, states, first, False)
    y, config = v.new_empty(v.shape), call.config("delta_outputs")
    given = {"q": made.rows["q"], "log": made.log, "betas": made.betas, "of_queries": made.of_queries}
    rest = {"solved": made.solved, "moved": made.moved, "states": states, "y": y, **strides("q", made.rows["q"])}
    grid = call.grid(count_blocks(call.values, config, "BLOCK_V"))
    launch(kernels.delta_outputs, grid, {**given, **rest, **call.sizes}, config)
    return y, last, states


def gated_delta_rule_vjp(
    dy: Tensor | None,
    dh_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    mask: Mask,
) -> tuple[Tensor | None, ...]:
    """See `adjcomp.ops.gated_delta_rule`: cotangents of (q, k, v, g, beta, h0)."""
    if is_wide(states):
        return chunked_delta.gated_delta_rule_vjp(dy, dh_last, q, k, v, g, beta, states, mask)
    dy = torch.zeros_like(v) if dy is None else dy
    lam, inputs = parameter(dh_last), (q, k, v, g, beta)
    if v.shape[1] <= SPAN_STEPS:
        *grads, lam = _span_vjp(dy, lam, inputs, states)
    else:
        grads = [t.new_empty(t.shape) for t in inputs]
        for span in reversed([*_spans(v.shape[1])]):
            first = span.start // CHECKPOINT_STEPS
            kept = states[:, first : -(-span.stop // CHECKPOINT_STEPS) + 1]
            *found, lam = _span_vjp(dy[:, span], lam, tuple(t[:, span] for t in inputs), kept)
            for grad, part in zip(grads, found, strict=True):
                grad[:, span] = part
    return (*cast_like([*grads], [*inputs], mask[:5]), lam if mask[5] else None)


def _span_vjp(dy: Tensor, last: Tensor | None, inputs: tuple[Tensor, ...], states: Tensor) -> tuple[Tensor, ...]:
    """Cotangents of the inputs of a span, and the adjoint state before it, from that after it (zeros when None)."""
    call = call_of(*inputs[:4])
    made, dy, states = prepare(call, *inputs), timed(dy), states.contiguous()
    direct = multiply(call, made.of_queries, dy, made.sums, False, transpose=True)
    adjoints = call.room(call.chunks + 1, call.heads, call.keys, call.values)
    early = multiply(call, made.inverse, direct, made.sums, True, transpose=True, scale=True)
    outer(call, made.rows["q"], dy, made.sums, adjoints, False, False, (made.rows["k"], early))
    dh0 = join(call, made.sums, made.moves, adjoints, last, True)
    _written(call, made, direct, states, adjoints)
    returned = multiply(call, made.inverse, direct, made.sums, True, transpose=True, scale=True)
    squares, dbeta, inside = _score_vjp(call, made, dy, direct, returned)
    given: dict[str, Any] = {"dy": dy, "q": made.rows["q"], "k": made.rows["k"], "log": made.log, "betas": made.betas}
    given |= {"written": made.solved, "returned": returned, "states": states, "adjoints": adjoints}
    given |= {**moves_of({"dy": dy, "q": made.rows["q"], "k": made.rows["k"]}), **call.sizes}
    dq, dk = (t.new_empty(t.shape, dtype=torch.float32) for t in inputs[:2])
    if call.wide:
        dg = inputs[3].new_empty(inputs[3].shape, dtype=torch.float32)
        _wide_key_vjp(call, given, squares, {"dq": dq, "dk": dk, "dg": dg})
    else:
        dg = _key_vjp(call, given, squares, {"dq": dq, "dk": dk}, inside)
    dv, dbeta = (t[:, :, : call.steps].transpose(1, 2) for t in (returned, dbeta))
    return dq, dk, dv, dg, dbeta, dh0


def _written(call: Call, made: Prepared, direct: Tensor, states: Tensor, adjoints: Tensor) -> None:
    """In place: `made.solved` becomes P, `direct` becomes dE."""
    config = call.config("delta_vjp_values")
    given = {"k": made.rows["k"], "log": made.log, "betas": made.betas, "solved": made.solved, "moved": made.moved}
    rest = {"direct": direct, "states": states, "adjoints": adjoints, **strides("k", made.rows["k"])}
    grid = call.grid(count_blocks(call.values, config, "BLOCK_V"))
    launch(vjp_kernels.delta_vjp_values, grid, {**given, **rest, **call.sizes}, config)


def _score_vjp(
    call: Call, made: Prepared, dy: Tensor, direct: Tensor, returned: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """dAkk and dAqk, dβ (batch, H, padded), and for a decay per head the products inside chunks (batch, H, padded)."""
    squares, dbeta = {"dkeys": call.square(), "dqueries": call.square()}, call.room(call.heads, call.padded)
    inside = None if call.wide else call.room(call.heads, call.padded)
    given = {"dy": dy, "betas": made.betas, "of_keys": made.of_keys, "of_queries": made.of_queries, "written": made.solved}
    rest = {"direct": direct, "returned": returned, **squares, "dbeta": dbeta, "inside": inside, **strides("dy", dy)}
    sizes = {**call.pick("T", "H", "V", "chunks", "WIDE", "Q"), **call.products}
    launch(vjp_kernels.delta_vjp_scores, call.grid(), {**given, **rest, **sizes}, call.config("delta_vjp_scores"))
    return squares, dbeta, inside


def _key_vjp(
    call: Call, given: dict[str, Any], squares: dict[str, Tensor], grads: dict[str, Tensor], inside: Tensor | None
) -> Tensor:
    """Writes dq and dk for a decay per head, and returns dg (batch, T, H)."""
    config = call.config("delta_vjp_keys")
    count = count_blocks(call.keys, config, "BLOCK_K")
    parts = {name: call.room(count, call.heads, call.padded) for name in ("seen", "carried")}
    parts["spanning"] = call.room(count, call.chunks, call.heads)
    launch(vjp_kernels.delta_vjp_keys, call.grid(count), {**given, **squares, **grads, **parts}, config)
    dg, config = call.room(call.steps, call.heads), call.config("delta_vjp_gates")
    sizes = {**call.pick("T", "H", "chunks", "Q"), "parts": count}
    launch(vjp_kernels.delta_vjp_gates, call.grid(), {**parts, **sizes, "inside": inside, "dg": dg}, config)
    return dg


def _wide_key_vjp(call: Call, given: dict[str, Any], squares: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Writes dq, dk and dg for a decay per channel."""
    config = call.config("delta_vjp_inside")
    parts = {name: call.room(call.heads, call.padded, call.keys) for name in ("dq_rows", "dk_rows", "dk_columns")}
    used = {name: given[name] for name in ("q", "k", "log", "q_b", "q_t", "k_b", "k_t", "T", "H", "K", "chunks", "Q")}
    grid = call.grid(CHECKPOINT_STEPS // SUB * count_blocks(call.keys, config, "BLOCK_K"))
    launch(vjp_kernels.delta_vjp_inside, grid, {**used, **squares, **parts, "PRECISION": call.exact}, config)
    config = call.config("delta_vjp_keys_wide")
    rest = {"dqueries": squares["dqueries"], **parts, **grads}
    launch(vjp_kernels.delta_vjp_keys_wide, call.grid(count_blocks(call.keys, config, "BLOCK_K")), {**given, **rest}, config)


def gated_delta_rule_summary(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What a range of time does to any state: h_last = move h0 + end; move (batch, H, K, K), end (batch, H, K, V), float32."""
    if is_wide(q, k, v, g, beta):
        return summaries.gated_delta_rule_summary(q, k, v, g, beta)
    call = call_of(q, k, v, g)
    made = prepare(call, q, k, v, g, beta)
    own = call.room(call.chunks + 1, call.heads, call.keys, call.values)
    outer(call, made.rows["k"], made.solved, made.sums, own, True, True)
    return _whole(call, made, own, False)


def gated_delta_rule_adjoint_summary(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """What a range of time does to any adjoint state: dh0 = move dh_last + end; shapes as those of `gated_delta_rule_summary`."""
    if is_wide(dy, q, k, v, g, beta):
        return summaries.gated_delta_rule_adjoint_summary(dy, q, k, v, g, beta)
    call = call_of(q, k, v, g)
    made, dy = prepare(call, q, k, v, g, beta), timed(dy)
    own = call.room(call.chunks + 1, call.heads, call.keys, call.values)
    direct = multiply(call, made.of_queries, dy, made.sums, False, transpose=True)
    early = multiply(call, made.inverse, direct, made.sums, True, transpose=True, scale=True)
    outer(call, made.rows["q"], dy, made.sums, own, False, False, (made.rows["k"], early))
    return _whole(call, made, own, True)


def _whole(call: Call, made: Prepared, own: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """The walk from zero, and that of the identity without the chunks' own states."""
    end = join(call, made.sums, made.moves, own, None, reverse)
    identity = torch.eye(call.keys, device=end.device).expand(call.batch, call.heads, call.keys, call.keys).contiguous()
    nothing = torch.zeros((call.batch, call.chunks + 1, call.heads, call.keys, call.keys), device=end.device)
    return join(call, made.sums, made.moves, nothing, identity, reverse), end
