"""Actions that join ranges of time by summaries: halos, summaries, and the states and adjoint states that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

from adjcomp.ir.joining import DerivedProgram, JoinPrograms
from adjcomp.ir.stack import Layer, OutputKind
from adjcomp.ir.summaries import (
    AdjointSettle,
    AdjointSummarize,
    Adopt,
    Detach,
    RangeAction,
    Settle,
    SplitHalo,
    Summarize,
    Tail,
    TailVjp,
)
from adjcomp.ir.values import adjoint, adjoint_summary, carry, cotangent, halo, halo_adjoint, keep, stream, summary
from adjcomp.runtime.backward import Backward
from adjcomp.runtime.codegen import compiled
from adjcomp.runtime.joining import applied, unit
from adjcomp.runtime.tiles import Tiles
from adjcomp.runtime.values import Held, Tensor, present


class Ranges:
    """Runs them on the values of a step. A running summary is its states (or their cotangents), then their products."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.values = tiles, tiles.values

    def forward(self, action: RangeAction) -> None:
        """An action before the Turn."""
        k, chunk = action.layer, action.chunk
        joins = self.tiles.executable.join(k)
        match action:
            case Tail():
                self.values[halo(k, chunk)] = self._tail(k, chunk, joins)
            case Summarize(first=first):
                self.values[summary(k, chunk)] = self._summarize(k, chunk, first, joins)
            case Settle(first=first):
                self.values[carry(k, chunk)] = self._settle(k, chunk, first, joins)
            case Adopt():
                found = dict(zip(_needed(joins.tail).carries, self.values[halo(k, chunk)], strict=True))
                self.values[carry(k, chunk)] = [found[i] for i in sorted(found)]
            case _:
                raise NotImplementedError(f"the executor has no rule for {type(action).__name__} in the forward")

    def backward(self, action: RangeAction, reverse: Backward) -> None:
        """An action after the Turn."""
        k, chunk = action.layer, action.chunk
        joins = self.tiles.executable.join(k)
        match action:
            case AdjointSummarize(last=last):
                self.values[adjoint_summary(k, chunk - 1)] = self._adjoint_summarize(k, chunk, last, joins, reverse)
            case AdjointSettle(last=last):
                self.values[adjoint(k, chunk)] = self._adjoint_settle(k, chunk, last, joins)
            case Detach():
                self.values[adjoint(k, chunk)] = self._nothing(k)
            case SplitHalo():
                _, template = self.tiles.layer(k)
                held, halos = self.values[adjoint(k, chunk)], _needed(joins.tail_vjp).cotangents
                self.values[halo_adjoint(k, chunk)] = [held[template.outputs[i].index] for i in halos]
            case TailVjp():
                if k <= reverse.active_top:
                    self._tail_vjp(k, chunk, joins, reverse)
            case _:
                raise NotImplementedError(f"the executor has no rule for {type(action).__name__} in the backward")

    def _tail(self, k: int, chunk: int, joins: JoinPrograms) -> Held:
        tail = _needed(joins.tail)
        return self._run(tail, self.tiles.derived(k, chunk, tail.reads, [], joins.steps), [])

    def _summarize(self, k: int, chunk: int, first: int, joins: JoinPrograms) -> Held:
        program, (layer, _) = _needed(joins.summarize), self.tiles.layer(k)
        if chunk > first:
            before = self.values[summary(k, chunk - 1)]
            states, products = before[: len(layer.carries)], before[len(layer.carries) :]
        else:
            states, products = self._zeros(layer, range(len(layer.carries)), joins), self._units(program, joins)
            for i, tensor in zip(joins.tail.carries, self.values[halo(k, first - 1)], strict=True) if joins.tail else ():
                states[i] = tensor
        arguments = self.tiles.derived(k, chunk, program.reads, states)
        return self._run(program, [*arguments, *map(present, products)], [])

    def _settle(self, k: int, chunk: int, first: int, joins: JoinPrograms) -> Held:
        program, (layer, _) = _needed(joins.summarize), self.tiles.layer(k)
        whole, before, count = self.values[summary(k, chunk)], self.values[carry(k, first - 1)], len(layer.carries)
        made: Held = [None] * count
        for i, product in zip(program.products, whole[count:], strict=True):
            made[i] = applied(joins.rules[i], (present(product), present(whole[i])), present(before[i]))
        self.tiles.tracker.track_all(made)
        for i, tensor in zip(joins.tail.carries, self.values[halo(k, chunk)], strict=True) if joins.tail else ():
            made[i] = tensor
        return made

    def _adjoint_summarize(self, k: int, chunk: int, last: int, joins: JoinPrograms, reverse: Backward) -> Held:
        program, (layer, template) = _needed(joins.adjoint_summarize), self.tiles.layer(k)
        if chunk < last:
            before = self.values[adjoint_summary(k, chunk)]
        else:
            before = [*self._zeros(layer, program.carries, joins), *self._units(program, joins)]
        if k > reverse.active_top:
            return before
        states, products = before[: len(program.carries)], before[len(program.carries) :]
        running = dict(zip(program.carries, states, strict=True))
        kept = self.values[keep(k, chunk)]
        arguments = self.tiles.arguments(k, chunk, program.reads)
        arguments += [present(self.values[stream(k, chunk)][0]) for _ in program.reads_outputs]
        arguments += [present(kept[i]) for i in program.saved]
        for i in program.cotangents:
            entry = template.outputs[i]
            if entry.kind is OutputKind.CARRY:
                info, given = layer.carries[entry.index], running.get(entry.index)
                arguments.append(self.tiles.zeros(info.shape, info.dtype) if given is None else given)
            else:
                arguments.append(reverse.cotangent(k, chunk, i, keep=True))
        return self._run(program, [*arguments, *map(present, products)], [])

    def _adjoint_settle(self, k: int, chunk: int, last: int, joins: JoinPrograms) -> Held:
        program = _needed(joins.adjoint_summarize)
        whole, after = self.values[adjoint_summary(k, chunk)], self.values[adjoint(k, last)]
        made, count = self._nothing(k), len(program.carries)
        for i, end, product in zip(program.carries, whole[:count], whole[count:], strict=True):
            made[i] = applied(joins.rules[i], (present(product), present(end)), present(after[i]))
        self.tiles.tracker.track_all([made[i] for i in program.carries])
        return made

    def _tail_vjp(self, k: int, chunk: int, joins: JoinPrograms, reverse: Backward) -> None:
        program, (layer, template) = _needed(joins.tail_vjp), self.tiles.layer(k)
        arguments = self.tiles.derived(k, chunk, program.reads, [], joins.steps)
        for i, given in zip(program.cotangents, self.values[halo_adjoint(k, chunk)], strict=True):
            info = layer.carries[template.outputs[i].index]
            arguments.append(self.tiles.zeros(info.shape, info.dtype) if given is None else given)
        _, end = self.tiles.span(chunk)
        gradients = reverse.accumulators(k, chunk, (end - joins.steps, end))
        for share in self._run(program, arguments, gradients):
            whole = self.values[cotangent(k - 1, chunk)]
            if whole[0] is None:
                whole[0] = self.tiles.stream_zeros(k - 1, chunk)
            self.tiles.last_steps(k - 1, present(whole[0]), joins.steps).add_(present(share))

    def _run(self, derived: DerivedProgram, arguments: list[Tensor], gradients: list[Tensor | None]) -> Held:
        return list(compiled(derived.program, self.tiles.device)(arguments, gradients, self.tiles.tracker))

    def _zeros(self, layer: Layer, carries: Sequence[int], joins: JoinPrograms) -> Held:
        """Zeros for the linear states among some carries, None for halos."""
        infos = [(layer.carries[i], joins.rules[i].is_linear) for i in carries]
        return [self.tiles.zeros(info.shape, info.dtype) if linear else None for info, linear in infos]

    def _units(self, program: DerivedProgram, joins: JoinPrograms) -> Held:
        """The products of no steps."""
        made: Held = [unit(joins.rules[i], self.tiles.device) for i in program.products]
        self.tiles.tracker.track_all(made)
        return made

    def _nothing(self, k: int) -> Held:
        """Zeros for every carry that takes a cotangent."""
        layer, template = self.tiles.layer(k)
        wanted = [entry.differentiable for entry in template.outputs if entry.kind is OutputKind.CARRY]
        pairs = zip(layer.carries, wanted, strict=True)
        return [self.tiles.zeros(info.adjoint_shape, info.dtype) if takes else None for info, takes in pairs]


def _needed(program: DerivedProgram | None) -> DerivedProgram:
    if program is None:
        raise RuntimeError("the plan joins ranges of a layer in a way that its programs don't know")
    return program
