"""One layer over a sequence: chunk by chunk, and in ranges that are joined by summaries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adjcomp.ir.joining import DerivedProgram, JoinPrograms
from adjcomp.ir.program import Program, TilePrograms
from adjcomp.ir.stack import InputKind, OutputKind
from adjcomp.passes.joinable import Joinable, NotJoinable, joinable
from adjcomp.passes.joining import join_graphs, join_programs
from adjcomp.passes.pipeline import Captured, run_capture
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.sizes import size_at
from adjcomp.passes.split import KeepPolicy, split
from adjcomp.runtime.codegen import compiled
from adjcomp.runtime.joining import applied, unit
from adjcomp.runtime.memory import StorageTracker

CPU = torch.device("cpu")


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """A call of a model, cut."""
    return run_capture(model, args, kwargs)


def classified(found: Captured, layer: int = 1) -> Joinable | NotJoinable:
    """Whether the ranges of a layer join."""
    index = found.stack.layers[layer].template
    return joinable(found.stack.templates[index], found.joints[index])


@dataclass
class Run:
    """What a sequential or a joined run gives: states and adjoint states at borders, by chunk, and gradients."""

    states: dict[int, list[Tensor]] = field(default_factory=dict)  # before chunk c
    adjoints: dict[int, list[Tensor | None]] = field(default_factory=dict)  # after chunk c
    cotangents: dict[int, Tensor] = field(default_factory=dict)  # of the layer's input, by chunk
    gradients: list[Tensor | None] = field(default_factory=list)


class LayerRuns:
    """Both runs of one layer of a captured model, on random inputs and cotangents; time is cut at multiples of `length`."""

    def __init__(self, found: Captured, model: nn.Module, steps: int, length: int, policy: KeepPolicy, layer: int = 1) -> None:
        stack = found.stack
        self.layer, index = stack.layers[layer], stack.layers[layer].template
        self.template, joint = stack.templates[index], found.joints[index]
        assert joint is not None
        classes = classified(found, layer)
        assert isinstance(classes, Joinable), classes
        self.rules, self.steps, self.length = classes.rules, steps, length
        cut = split(joint, policy)
        graphs = join_graphs(classes, cut)
        lengths = {length, steps % length or length}
        self.tiles = {n: tile_programs(self.template, cut, n) for n in lengths}
        self.joins = {n: join_programs(graphs, n) for n in lengths}
        self.state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.count = -(-steps // length)
        self._draw()

    def _draw(self) -> None:
        placeholders = [n for n in self.template.graph.graph.nodes if n.op == "placeholder"]
        results = next(n for n in self.template.graph.graph.nodes if n.op == "output").args[0]
        generator = torch.Generator().manual_seed(0)

        def whole(value: Tensor) -> Tensor:
            shape = [size_at(s, self.template.time, self.steps) for s in value.shape]
            if value.is_floating_point() or value.is_complex():
                return torch.randn(shape, generator=generator, dtype=torch.float64).to(value.dtype)
            return torch.randint(0, 2, shape, generator=generator).to(value.dtype)

        self.values = [n.meta["val"] for n in placeholders]
        self.whole = [whole(value) for value in self.values]
        self.given = [whole(n.meta["val"]) for n in results]
        self.results = [n.meta["val"] for n in results]

    def _span(self, chunk: int) -> tuple[int, int]:
        return chunk * self.length, min(self.steps, (chunk + 1) * self.length)

    def _cut(self, whole: Tensor, value: Tensor, span: tuple[int, int]) -> Tensor:
        for dim, size in enumerate(value.shape):
            if not isinstance(size, int):
                return whole.narrow(dim, span[0], span[1] - span[0])
        return whole

    def _argument(self, i: int, span: tuple[int, int], carries: Sequence[Tensor]) -> Tensor:
        entry = self.template.inputs[i]
        match entry.kind:
            case InputKind.PARAMETER:
                return self.state[self.layer.parameters[entry.index]].detach()
            case InputKind.CARRY:
                return carries[entry.index]
            case InputKind.SEED:
                return torch.tensor(11)
            case InputKind.OFFSET:
                return torch.tensor(span[0])
            case _:
                return self._cut(self.whole[i], self.values[i], span).contiguous()

    def _accumulators(self, programs: TilePrograms, run: Run, span: tuple[int, int]) -> list[Tensor | None]:
        if not run.gradients:
            wanted = [(self.template.inputs[i], i) for i in programs.gradients]
            like = [
                self.whole[i] if e.kind is InputKind.SIDE else self._argument(i, (0, 1), [torch.zeros(0)] * 9) for e, i in wanted
            ]
            kinds = (InputKind.PARAMETER, InputKind.SIDE)
            run.gradients = [self._zeros(t) if e.kind in kinds else None for t, (e, _) in zip(like, wanted, strict=True)]
        pairs = zip(run.gradients, programs.gradients, strict=True)
        return [None if t is None else self._cut(t, self.values[i], span) for t, i in pairs]

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.float64 if like.dtype is torch.float64 else torch.float32)

    def _call(self, program: Program, arguments: list[Tensor], gradients: list[Tensor | None]) -> tuple[Any, ...]:
        before = [(t, t.clone()) for t in arguments]
        results = compiled(program, CPU)(arguments, gradients, StorageTracker(0))
        if not program.owned:
            assert all(torch.equal(t, old) for t, old in before), f"{program.name} wrote into an argument"
        return results

    def _derived(self, derived: DerivedProgram, span: tuple[int, int], carries: Sequence[Tensor], **rest: Any) -> tuple[Any, ...]:
        arguments = [self._argument(i, span, carries) for i in derived.reads]
        arguments += [rest["outputs"][i] for i in derived.reads_outputs]
        arguments += [rest["kept"][i] for i in derived.saved]
        arguments += [rest["tangents"][i] for i in derived.cotangents]
        arguments += [rest["products"][i] for i in derived.products]
        return self._call(derived.program, arguments, rest.get("gradients", []))

    def zeros(self) -> list[Tensor]:
        """A state of zeros, or its cotangent."""
        kinds = [(o, v) for o, v in zip(self.template.outputs, self.results, strict=True) if o.kind is OutputKind.CARRY]
        return [torch.zeros(tuple(v.shape), dtype=v.dtype) for _, v in kinds]

    def last_adjoint(self) -> list[Tensor]:
        """Cotangents of the states after the last step."""
        return [t for o, t in zip(self.template.outputs, self.given, strict=True) if o.kind is OutputKind.CARRY]

    def forward(self, run: Run, chunks: Sequence[int], state: list[Tensor]) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        """Run chunks with what they keep: (outputs, kept) of each."""
        made = {}
        count = len(self.template.outputs)
        for c in chunks:
            span = self._span(c)
            run.states[c] = state
            program = self.tiles[span[1] - span[0]].keeping
            assert program is not None
            found = self._call(program, [self._argument(i, span, state) for i in range(len(self.values))], [])
            made[c] = (list(found[:count]), list(found[count:]))
            state = [t for o, t in zip(self.template.outputs, found[:count], strict=True) if o.kind is OutputKind.CARRY]
        return made

    def tangents(self, chunk: int, adjoint: Sequence[Tensor | None]) -> list[Tensor]:
        """A cotangent for each output of a chunk's tile."""
        carries = iter(adjoint)
        found: list[Any] = []
        for entry, whole, value in zip(self.template.outputs, self.given, self.results, strict=True):
            is_carry = entry.kind is OutputKind.CARRY
            found.append(next(carries) if is_carry else self._cut(whole, value, self._span(chunk)).contiguous())
        return found

    def backward(self, run: Run, made: dict[int, Any], adjoint: list[Tensor | None]) -> list[Tensor | None]:
        """VJPs of the chunks in `made`, last first; the cotangent of the state before them."""
        for c in sorted(made, reverse=True):
            span = self._span(c)
            programs = self.tiles[span[1] - span[0]]
            assert programs.vjp is not None
            run.adjoints[c] = adjoint
            arguments = [self._argument(i, span, run.states[c]) for i in programs.reads]
            arguments += [made[c][0][i] for i in programs.reads_outputs] + [t.clone() for t in made[c][1]]
            tangents = self.tangents(c, adjoint)
            arguments += [tangents[i].clone() for i in programs.cotangents]
            found = iter(self._call(programs.vjp, arguments, self._accumulators(programs, run, span)))
            adjoint = [None] * len(self.rules)
            for i in programs.gradients:
                entry = self.template.inputs[i]
                if entry.kind is InputKind.STREAM:
                    run.cotangents[c] = next(found)
                elif entry.kind is InputKind.CARRY:
                    adjoint[entry.index] = next(found)
        return adjoint

    def sequential(self) -> Run:
        """Everything in order."""
        run = Run()
        made = self.forward(run, range(self.count), self.zeros())
        run.adjoints[-1] = self.backward(run, made, list(self.last_adjoint()))
        return run

    def joined(self, borders: Sequence[int]) -> Run:
        """Ranges of chunks that begin at `borders` (0 first), joined by their summaries."""
        run = Run()
        ranges = [range(a, b) for a, b in itertools.pairwise([*borders, self.count])]
        made = {}
        for chunks, state in zip(ranges, self._states(ranges), strict=True):
            made[chunks] = self.forward(run, chunks, state)
        adjoints = self._adjoints(run, ranges, made)
        before: list[Tensor | None] = []
        for chunks in reversed(ranges):
            last = chunks is ranges[-1]
            start = [
                t if rule.is_linear or last else torch.zeros_like(t) for rule, t in zip(self.rules, adjoints[chunks], strict=True)
            ]
            halos, before = before, self.backward(run, made[chunks], start)
            if not last:
                self._add_tail(run, chunks.stop - 1, halos)
        run.adjoints[-1] = before
        return run

    def _joins(self, chunk: int) -> JoinPrograms:
        start, stop = self._span(chunk)
        return self.joins[stop - start]

    def _states(self, ranges: Sequence[range]) -> list[list[Tensor]]:
        """The state before each range, handed from range to range."""
        found = [self.zeros()]
        for chunks, later in itertools.pairwise(ranges):
            halos = self._halos(later.start * self.length)
            linear, products = self._summary(chunks, found[-1])
            state = list(found[-1])
            for i, rule in enumerate(self.rules):
                state[i] = applied(rule, (products[i], linear[i]), state[i]) if rule.is_linear else halos[i]
            found.append(state)
        return found

    def _halos(self, stop: int) -> dict[int, Tensor]:
        tail = self.joins[self.length].tail
        if tail is None:
            return {}
        span = (stop - self.joins[self.length].steps, stop)
        return dict(zip(tail.carries, self._derived(tail, span, []), strict=True))

    def _units(self) -> dict[int, Tensor]:
        return {i: unit(rule, CPU) for i, rule in enumerate(self.rules) if rule.is_linear}

    def _summary(self, chunks: range, before: list[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """End states from nothing but halos, and products, of a range."""
        state = [torch.zeros_like(t) if rule.is_linear else t for rule, t in zip(self.rules, before, strict=True)]
        products = self._units()
        for c in chunks:
            summarize = self._joins(c).summarize
            if summarize is None:
                break
            found = self._derived(summarize, self._span(c), state, products=products)
            state = list(found[: len(self.rules)])
            products = dict(zip(summarize.products, found[len(self.rules) :], strict=True))
        return state, products

    def _adjoints(self, run: Run, ranges: Sequence[range], made: dict[range, Any]) -> dict[range, list[Any]]:
        """The cotangent of the state after each range; nothing good for halos."""
        found = {ranges[-1]: list(self.last_adjoint())}
        for chunks, earlier in itertools.pairwise(list(reversed(ranges))):
            adjoint = [torch.zeros_like(t) for t in found[chunks]]
            products = self._units()
            for c in reversed(chunks):
                program = self._joins(c).adjoint_summarize
                if program is None:
                    break
                tangents = self.tangents(c, adjoint)
                outputs, kept = made[chunks][c]
                rest = {"outputs": outputs, "kept": kept, "tangents": tangents, "products": products}
                results = self._derived(program, self._span(c), run.states[c], **rest)
                for i, t in zip(program.carries, results, strict=False):
                    adjoint[i] = t
                products = dict(zip(program.products, results[len(program.carries) :], strict=True))
            found[earlier] = [
                applied(rule, (products[i], adjoint[i]), found[chunks][i]) if i in products else adjoint[i]
                for i, rule in enumerate(self.rules)
            ]
        return found

    def _add_tail(self, run: Run, chunk: int, adjoint: list[Tensor | None]) -> None:
        """What the halos that leave a range give to its last steps and to parameters."""
        joins = self.joins[self.length]
        if joins.tail_vjp is None:
            return
        stop = self._span(chunk)[1]
        span = (stop - joins.steps, stop)
        gradients = self._accumulators(self.tiles[self.length], run, span)
        found = self._derived(joins.tail_vjp, span, [], tangents=self.tangents(chunk, adjoint), gradients=gradients)
        if found:
            run.cotangents[chunk] = run.cotangents[chunk].clone()
            run.cotangents[chunk][:, -joins.steps :] += found[0]


def worst(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Largest relative error."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None and b.numel()]
    return max((((a - b).norm() / (b.norm() or 1.0)).item() for a, b in pairs), default=0.0)


def errors(runs: LayerRuns, borders: Sequence[int]) -> dict[str, float]:
    """Relative errors of a joined run against the sequential one."""
    want, got = runs.sequential(), runs.joined(borders)
    linear = [i for i, rule in enumerate(runs.rules) if rule.is_linear]
    ends = [b - 1 for b in borders[1:]]
    return {
        "states": max((worst(got.states[b], want.states[b]) for b in borders), default=0.0),
        "adjoints": max(
            (worst([got.adjoints[c][i] for i in linear], [want.adjoints[c][i] for i in linear]) for c in ends), default=0.0
        ),
        "inputs": worst(
            [got.cotangents[c] for c in sorted(want.cotangents)], [want.cotangents[c] for c in sorted(want.cotangents)]
        ),
        "parameters": worst(got.gradients, want.gradients),
    }
