"""From an FX graph to a Program at one chunk length: sizes become numbers, slots get their last use, gradients go to
accumulators.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from adjcomp.ir.program import (
    Accumulate,
    AccumulateProduct,
    AccumulateRows,
    Accumulator,
    Compute,
    Instruction,
    Program,
    Slot,
    Span,
    TilePrograms,
)
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.passes.aliasing import is_alias, is_fresh, storage_root
from adjcomp.passes.emitting import fake_result
from adjcomp.passes.lastuse import with_frees
from adjcomp.passes.liveness import workspace
from adjcomp.passes.shares import Share, folded_into, part_of, products_in
from adjcomp.passes.sizes import SlotSizes, Target, number_of_bytes, shape_at, size_at
from adjcomp.passes.split import Split
from adjcomp.passes.work import work_of

aten = torch.ops.aten
ops = torch.ops.adjcomp


def tile_programs(template: Template, split: Split | None, length: int) -> TilePrograms:
    """All programs of a template at one chunk length."""
    at = Target(template.time, length)
    forward = _Lowering(template.graph.graph, at, "forward").results_owned().build()
    if split is None:
        return TilePrograms(forward, None, None, 0, (), (), (), ())
    results = list(next(n for n in split.forward.nodes if n.op == "output").args[0])
    saved = results[len(template.outputs) :]
    lowering = _Lowering(split.forward, at, "forward, keeping")
    lowering.kept = {*saved}.difference(results[: len(template.outputs)])
    keeping = lowering.results_owned().build()
    return TilePrograms(
        forward=forward,
        keeping=keeping,
        vjp=_vjp(split, at),
        saved_bytes=sum(_storage_bytes(n, at) for n in saved),
        reads=split.reads,
        reads_outputs=split.reads_outputs,
        cotangents=split.joint.cotangents,
        gradients=split.joint.gradients,
    )


def lower(graph: fx.Graph, at: Target, name: str, results: Sequence[fx.Node], accumulate: Mapping[fx.Node, list[int]]) -> Program:
    """A graph that takes nothing over from its caller, at one length; `accumulate`: gradients, with their accumulators."""
    lowering = _Lowering(graph, at, name)
    lowering.results, lowering.accumulate = list(results), dict(accumulate)
    return lowering.results_owned().build()


def _storage_bytes(node: fx.Node, at: Target) -> int:
    return number_of_bytes(node.meta["val"], at.time, at.length)


def _vjp(split: Split, at: Target) -> Program:
    template = split.joint.template
    lowering = _Lowering(split.backward, at, "vjp")
    placeholders = [n for n in split.backward.nodes if n.op == "placeholder"]
    first_saved = len(split.reads) + len(split.reads_outputs)
    first_cotangent = first_saved + split.saved
    streams = [
        p
        for p, i in zip(placeholders[first_cotangent:], split.joint.cotangents, strict=True)
        if template.outputs[i].kind is OutputKind.STREAM
    ]
    lowering.owned = {*placeholders[first_saved:first_cotangent], *streams}
    grads = list(next(n for n in split.backward.nodes if n.op == "output").args[0])
    results: list[fx.Node] = []
    for number, (node, index) in enumerate(zip(grads, split.joint.gradients, strict=True)):
        if template.inputs[index].kind in (InputKind.STREAM, InputKind.CARRY):
            results.append(node)
        else:
            lowering.accumulate.setdefault(node, []).append(number)
    lowering.results = results
    return lowering.results_owned().build()


class _Lowering:
    """One graph on its way to a Program."""

    def __init__(self, graph: fx.Graph, at: Target, name: str) -> None:
        self.at = at
        self.name = f"{name} of {at.length} steps"
        self.nodes = list(graph.nodes)
        self.results: list[fx.Node] = list(self.nodes[-1].args[0])
        self.owned: set[fx.Node] = set()
        self.kept: set[fx.Node] = set()  # results for the VJP, which views them in the order of dimensions that they were made in
        self.accumulate: dict[fx.Node, list[int]] = {}
        self.copied: dict[fx.Node, Slot] = {}
        self.memo: dict[fx.Node, Any] = {}
        self.steps: list[Instruction] = []
        self.values: list[Any] = []  # fake value by slot number
        self.copy_results = False
        self.shares: dict[fx.Node, list[Share]] = {}  # gradients made of products alone, which are added in place
        self.parts: dict[fx.Node, tuple[fx.Node, Span]] = {}  # gradients of which a span alone isn't zero
        self.folded: set[fx.Node] = set()  # what is never held for that
        self.added: set[fx.Node] = set()  # gradients that an op has added to their accumulator itself

    def results_owned(self) -> _Lowering:
        """Results become dense tensors with storage of their own, so that a value's bytes are what its shape says."""
        self.copy_results = True
        return self

    def build(self) -> Program:
        """Emit the instructions, then find last uses and the peak."""
        for node in self.nodes:
            if node.op == "placeholder":
                self.memo[node] = self._slot(node.meta["val"])
        inputs = tuple(self.memo[n] for n in self.nodes if n.op == "placeholder")
        self.shares = {node: found for node in self.accumulate if self._sole(node) and (found := products_in(node))}
        self.folded = {node for gradient in self.shares for node in folded_into(gradient)}
        rest = [node for node in self.accumulate if node not in self.shares and self._sole(node)]
        self.parts = {node: part for node in rest if (part := part_of(node)) is not None}
        self.folded |= {*self.parts}
        for node in self.nodes:
            if node.op == "call_function":
                self._emit(node)
            for number in self.accumulate.get(node, ()):
                self._accumulate(node, number)
        outputs = tuple(self._result(n) for n in self.results)
        owned = frozenset(self.memo[n] for n in self.owned)
        steps = with_frees(self.steps, inputs, owned, outputs)
        sizes = SlotSizes(self.values, self.at)
        return Program(
            self.name, inputs, owned, steps, outputs, workspace(steps, inputs, owned, sizes.bytes_of), work_of(steps, sizes)
        )

    def _slot(self, value: Any) -> Slot:
        self.values.append(value)
        return Slot(len(self.values) - 1)

    def _emit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node in self.memo:
            return
        if not isinstance(value, torch.Tensor | tuple | list):
            self.memo[node] = size_at(value, self.at.time, self.at.length) if isinstance(value, int | torch.SymInt) else value
            return
        if node in self.folded or self._becomes_rows(node) or self._adds_loss(node) or self._adds_attention(node):
            return
        args, kwargs = self._arguments(node)
        result = self._slot(value)
        self.memo[node] = result
        target = node.target
        if target is aten.addmm.default and not kwargs and self._holds_sum(node):
            target = aten.addmm_.default
        fresh = not is_alias(node) and target not in (operator.getitem, aten.addmm_.default)
        self.steps.append(Compute(target, args, kwargs, result, allocates=fresh))
        for user in node.users:  # the parts of a result right away, so that nobody holds the unused ones
            if user.target is operator.getitem:
                self._emit(user)

    def _holds_sum(self, node: fx.Node) -> bool:
        """Whether the product can be added in place: to a value made for it, and no bias that is broadcast."""
        added = node.all_input_nodes[0]
        sizes = [shape_at(n.meta["val"], self.at.time, self.at.length) for n in (added, node)]
        return is_fresh(added) and sizes[0] == sizes[1]

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def look(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return self.memo[argument]
            if isinstance(argument, torch.SymInt):
                return size_at(argument, self.at.time, self.at.length)
            if isinstance(argument, list | tuple):
                return type(argument)(look(a) for a in argument)
            return argument

        return tuple(look(a) for a in node.args), {k: look(v) for k, v in node.kwargs.items()}

    def _becomes_rows(self, node: fx.Node) -> bool:
        """The gradient of a table that only feeds an accumulator is added row by row instead."""
        return node.target is aten.embedding_dense_backward.default and not node.args[4] and self._sole(node)

    def _adds_loss(self, node: fx.Node) -> bool:
        """The VJP of the head, where its weight's gradient only feeds an accumulator: emitted so that it adds there itself."""
        if node.target is not ops.linear_cross_entropy_vjp.default:
            return False
        parts = {user.args[1]: user for user in node.users}
        if 1 not in parts or not self._sole(parts[1]):
            return False
        if node.args[1].meta["val"].dtype is not node.args[2].meta["val"].dtype:
            return False
        args, _ = self._arguments(node)
        accumulator = Accumulator(self.accumulate[parts[1]][0])
        result = self._slot(node.meta["val"][0])
        target = ops.linear_cross_entropy_add_vjp.default
        self.steps.append(Compute(target, (*args[:-1], args[-1][0], accumulator), {}, result, allocates=True))
        self.memo[node] = result
        self.memo.update(dict.fromkeys(parts.values(), result))
        self.added.add(parts[1])
        return True

    def _adds_attention(self, node: fx.Node) -> bool:
        """The VJP of attention, where the cotangents of earlier keys and values only feed accumulators: emitted so that it adds
        there itself.
        """
        if node.target is not ops.causal_attention_vjp.default:
            return False
        parts = {user.args[1]: user for user in node.users}
        pasts = [parts.get(i) for i in (3, 4)]
        if node.args[4] is None or any(part is not None and not self._sole(part) for part in pasts):
            return False
        args, _ = self._arguments(node)
        sums = [None if part is None else Accumulator(self.accumulate[part][0]) for part in pasts]
        result = self._slot(node.meta["val"][:3])
        target = ops.causal_attention_add_vjp.default
        self.steps.append(Compute(target, (*args[:-1], args[-1][:3], *sums), {}, result, allocates=True))
        self.memo[node] = result
        for part in pasts:
            if part is not None:
                self.memo[part] = result
                self.added.add(part)
        for user in node.users:
            if user not in pasts:
                self._emit(user)
        return True

    def _sole(self, node: fx.Node) -> bool:
        return len(self.accumulate.get(node, ())) == 1 and all(user.op == "output" for user in node.users)

    def _accumulate(self, node: fx.Node, number: int) -> None:
        if node in self.added:
            return
        if self._becomes_rows(node):
            self._accumulate_rows(node, number)
        elif node in self.shares:
            for share in self.shares[node]:
                self._accumulate_product(number, share)
        elif node in self.parts:
            part, span = self.parts[node]
            self.steps.append(Accumulate(number, self.memo[part], span))
        else:
            self.steps.append(Accumulate(number, self.memo[node]))

    def _accumulate_product(self, number: int, share: Share) -> None:
        left, right = cast("tuple[fx.Node, fx.Node]", share.product.args)
        if not share.is_tall:
            step = AccumulateProduct(number, self.memo[left], self.memo[right], share.transposed, share.span)
            self.steps.append(step)
            return
        value = share.product.meta["val"]
        product = self._slot(value.t())
        turned = (self._transposed(right), self._transposed(left))
        self.steps.append(Compute(aten.mm.default, turned, {}, product, allocates=True))
        if not share.transposed:
            product = self._view(aten.t.default, product, value)
        self.steps.append(Accumulate(number, product))

    def _transposed(self, node: fx.Node) -> Slot:
        source = node.args[0]
        if node.target is aten.t.default and isinstance(source, fx.Node) and source in self.memo:
            found: Slot = self.memo[source]
            return found
        return self._view(aten.t.default, self.memo[node], node.meta["val"].t())

    def _view(self, target: Any, source: Slot, value: Any) -> Slot:
        made = self._slot(value)
        self.steps.append(Compute(target, (source,), {}, made, allocates=False))
        return made

    def _accumulate_rows(self, node: fx.Node, number: int) -> None:
        value, rows, _, padding, _ = cast("tuple[fx.Node, fx.Node, int, int, bool]", node.args)
        slot = self.memo[value]
        if value.meta["val"].dtype not in (torch.float32, torch.float64):
            slot = self._slot(fake_result(aten._to_copy.default, (value,), {"dtype": torch.float32}))
            self.steps.append(Compute(aten._to_copy.default, (self.memo[value],), {"dtype": torch.float32}, slot, allocates=True))
        self.steps.append(AccumulateRows(number, self.memo[rows], slot, padding if padding >= 0 else None))

    def _result(self, node: fx.Node) -> Slot:
        slot: Slot = self.memo[node]
        value = node.meta["val"]
        root = storage_root(node)
        dense = _is_dense(value, self.at, node in self.kept) and (root.op != "placeholder" or self._may_alias(root))
        if not self.copy_results or (dense and (root is node or _same_bytes(root, node, self.at))):
            return slot
        if node not in self.copied:
            copy = self._slot(value)
            self.steps.append(
                Compute(aten.clone.default, (slot,), {"memory_format": torch.contiguous_format}, copy, allocates=True)
            )
            self.copied[node] = copy
        return self.copied[node]

    def _may_alias(self, root: fx.Node) -> bool:
        return root in self.owned


def _same_bytes(root: fx.Node, node: fx.Node, at: Target) -> bool:
    return isinstance(root.meta["val"], torch.Tensor) and _storage_bytes(root, at) == _storage_bytes(node, at)


def _is_dense(value: torch.Tensor, at: Target, any_order: bool) -> bool:
    """Whether a value fills its storage: row by row, or with its dimensions in any order."""
    strides = [size_at(stride, at.time, at.length) for stride in value.stride()]
    pairs = [*zip(shape_at(value, at.time, at.length), strides, strict=True)]
    expected = 1
    for size, stride in sorted(pairs, key=lambda pair: pair[1]) if any_order else reversed(pairs):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
