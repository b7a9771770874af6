"""How much a program computes: the terms of the analytic cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from adjcomp.ir.program import Accumulate, AccumulateProduct, AccumulateRows, Compute, Instruction, Slot, Work
from adjcomp.passes.aliasing import writes_first_argument
from adjcomp.passes.sizes import SlotSizes

aten = torch.ops.aten
_ops = torch.ops.adjcomp
_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.addmm_.default: 1, aten.baddbmm.default: 1}
_RECURRENCES = {
    _ops.linear_scan.default,
    _ops.dense_scan.default,
    _ops.selective_scan.default,
    _ops.ssd.default,
    _ops.gated_delta_rule.default,
    _ops.linear_attention.default,
    _ops.max_plus_scan.default,
    _ops.logcumsumexp.default,
}
_RECURRENCE_VJPS = {
    _ops.linear_scan_vjp.default,
    _ops.dense_scan_vjp.default,
    _ops.selective_scan_vjp.default,
    _ops.ssd_vjp.default,
    _ops.gated_delta_rule_vjp.default,
    _ops.linear_attention_vjp.default,
    _ops.max_plus_scan_vjp.default,
    _ops.logcumsumexp_vjp.default,
}
_SUMMARIES = {
    getattr(_ops, f"{name}{suffix}").default
    for name in ("linear_scan", "dense_scan", "selective_scan", "ssd", "gated_delta_rule")
    for suffix in ("_summary", "_adjoint_summary")
}
# Those whose product is a matrix, made by a recurrence of its own.
_MATRICES = {s for s in _SUMMARIES if s._schema.name.startswith(("adjcomp::dense_scan", "adjcomp::gated_delta_rule"))}
# Windowed VJPs, with the argument that shows the state, and the first dimension of it that is the state's after the batch.
_WINDOWED = {
    _ops.linear_scan_window_vjp.default: (3, 2),
    _ops.dense_scan_window_vjp.default: (3, 2),
    _ops.selective_scan_window_vjp.default: (10, 1),
    _ops.ssd_window_vjp.default: (10, 1),
    _ops.gated_delta_rule_window_vjp.default: (7, 1),
}
_GROUPED = {_ops.grouped_linear.default: 0, _ops.grouped_linear_vjp.default: 1}  # the place of x
_LOSS_PRODUCTS = {
    _ops.linear_cross_entropy.default: (0, 1),
    _ops.linear_cross_entropy_vjp.default: (1, 3),
    _ops.linear_cross_entropy_add_vjp.default: (1, 3),
}
# Attention, with the first of its arguments q, k, v, and products over channels and over values for each pair of steps.
_ATTENTION = {
    _ops.causal_attention.default: (0, 1, 1),
    _ops.causal_attention_vjp.default: (1, 3, 2),
    _ops.causal_attention_add_vjp.default: (1, 3, 2),
}
WINDOW_UPDATES = 12  # two scans, two products and two sums over states, each in memory
VJP_UPDATES = 2  # a VJP rebuilds the states and runs the adjoint recurrence over them


def work_of(steps: Sequence[Instruction], sizes: SlotSizes) -> Work:
    """Sum over the instructions."""
    flops = updates = moved = kernels = past = 0
    for step in steps:
        match step:
            case AccumulateProduct():
                flops += _product_flops(sizes, step.left, step.right)
                moved += _moved(sizes, [step.left, step.right])
                kernels += 1
            case Accumulate():
                moved += 3 * _moved(sizes, [step.value])
                kernels += 1
            case AccumulateRows():
                moved += 3 * _moved(sizes, [step.value])
                kernels += 1
            case Compute() if step.allocates or writes_first_argument(step.target):
                flops += _flops(step, sizes)
                updates += _updates(step, sizes)
                past += _attention_flops(step, sizes)[1]
                moved += _moved(sizes, [*_slots(step.args), step.result])
                kernels += 1
    return Work(flops, updates, moved, kernels, past)


def _slots(argument: object) -> list[Slot]:
    if isinstance(argument, Slot):
        return [argument]
    return [s for a in argument for s in _slots(a)] if isinstance(argument, tuple | list) else []


def _moved(sizes: SlotSizes, slots: list[Slot]) -> int:
    return sum(sum(sizes.bytes_of(slot)) for slot in slots)


def _product_flops(sizes: SlotSizes, left: Slot, right: Slot) -> int:
    a, b = sizes.shapes_of(left)[0], sizes.shapes_of(right)[0]
    return 2 * math.prod(a) * b[-1]


def _flops(step: Compute, sizes: SlotSizes) -> int:
    if step.target in _PRODUCTS:
        first = _PRODUCTS[step.target]
        return _product_flops(sizes, step.args[first], step.args[first + 1])
    if step.target in _GROUPED:
        first = _GROUPED[step.target]
        return (1 + first) * _product_flops(sizes, step.args[first], step.args[first + 1])
    if step.target in _LOSS_PRODUCTS:
        first, passes = _LOSS_PRODUCTS[step.target]
        x, weight = sizes.shapes_of(step.args[first])[0], sizes.shapes_of(step.args[first + 1])[0]
        return passes * 2 * math.prod(x) * weight[0]
    return _attention_flops(step, sizes)[0]


def _attention_flops(step: Compute, sizes: SlotSizes) -> tuple[int, int]:
    """Of attention: over the chunk's own keys, and for every key before it; under a window no key is far away."""
    if step.target not in _ATTENTION:
        return 0, 0
    first, over_channels, over_values = _ATTENTION[step.target]
    q, v = (sizes.shapes_of(step.args[i])[0] for i in (first, first + 2))
    rows = 2 * math.prod(q[:3]) * (over_channels * q[3] + over_values * v[3])  # all queries with one key
    scale = next(i for i, argument in enumerate(step.args) if isinstance(argument, float))
    window = step.args[scale + 1]
    return (rows * q[1] // 2, rows) if window is None else (rows * min(window, q[1]), 0)


def _updates(step: Compute, sizes: SlotSizes) -> int:
    """Steps · state elements of a recurrence."""
    if step.target in _RECURRENCES:
        outputs = sizes.shapes_of(step.result)
        return outputs[0][1] * math.prod(outputs[1])
    if step.target in _SUMMARIES:
        move, end = (math.prod(shape) for shape in sizes.shapes_of(step.result))
        return sizes.shapes_of(step.args[0])[0][1] * (end + move * (step.target in _MATRICES))
    if step.target in _WINDOWED:
        position, first = _WINDOWED[step.target]
        state = sizes.shapes_of(step.args[position])[0]
        steps = next(sizes.shapes_of(s)[0][1] for i, s in enumerate(step.args) if i != 1 and isinstance(s, Slot))
        return WINDOW_UPDATES * (steps + int(step.args[-1])) * state[0] * math.prod(state[first:])
    if step.target in _RECURRENCE_VJPS:
        cotangent = next(s for s in step.args if isinstance(s, Slot))
        state = sizes.shapes_of(step.args[1] if isinstance(step.args[1], Slot) else cotangent)[0]
        return VJP_UPDATES * sizes.shapes_of(cotangent)[0][1] * math.prod(state)
    return 0
