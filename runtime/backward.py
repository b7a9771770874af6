"""The half of a step after the Turn: cotangents, adjoint states and gradient accumulators."""

from __future__ import annotations

from adjcomp.ir.program import TilePrograms
from adjcomp.ir.stack import CarryInfo, InputKind, Layer, OutputKind, StoreInfo, Template
from adjcomp.ir.values import adjoint, cotangent, keep, stream
from adjcomp.runtime.norms import AdjointNorms
from adjcomp.runtime.recording import Results
from adjcomp.runtime.tiles import Tiles
from adjcomp.runtime.values import Cotangents, Held, StepGradients, StepOutputs, Tensor, accumulation_dtype, present


class Backward:
    """VJPs of tiles, from the cotangents that autograd hands in.

    Above `active_top`, the highest tile that any cotangent reaches, nothing is computed and parameters get no gradient, as in
    plain autograd.
    """

    def __init__(
        self, tiles: Tiles, outputs: StepOutputs, given: Cotangents, layers: frozenset[int], *, by_layer: bool = False
    ) -> None:
        """`layers`: those whose VJPs run here. by_layer: whether gradients come with the first VJP that adds to them."""
        self.tiles = tiles
        self.layers = layers
        self.stack = tiles.executable.stack
        self.outputs = outputs
        self.given = given
        self.parameters: dict[str, Tensor] = {}
        self.sides: dict[int, Tensor] = {}
        self.stores: dict[int, list[Tensor | None]] = {}  # what came back to keys and values, by layer
        self.initial: dict[int, Tensor] = {}
        self.by_layer = by_layer
        self.norms = AdjointNorms()
        self.active_top = max((k for k, layer in enumerate(self.stack.layers) if self._reached(layer)), default=-1)
        self.unpublished = self._users() if by_layer else {}

    def _reached(self, layer: Layer) -> bool:
        given = [*(self.given.sums[i] for i in layer.sums), *(self.given.outs[i] for i in layer.outs)]
        given += [self.given.finals[c.final] for c in layer.carries if c.final is not None]
        return any(cotangent is not None for cotangent in given)

    def _users(self) -> dict[str, set[int]]:
        """Parameters by name, with the layers that make gradients for them and aren't published yet."""
        users: dict[str, set[int]] = {}
        for k in range(self.active_top + 1):
            layer, template = self.tiles.layer(k)
            entries = [template.inputs[i] for i in self.tiles.executable.tile(k, 0).gradients]
            for entry in entries if k in self.layers else ():
                if entry.kind is InputKind.PARAMETER:
                    users.setdefault(layer.parameters[entry.index], set()).add(k)
        return users

    def start(self, first: int, last_layer: int) -> None:
        """Make the last adjoint states of some layers, room for what comes back to keys and, unless they come by layer, all
        accumulators.
        """
        last = self.tiles.executable.plan.costs.chunk_count - 1
        for k in range(len(self.stack.layers)):
            layer, template = self.tiles.layer(k)
            programs = self.tiles.executable.tile(k, last)
            if k <= self.active_top and k in self.layers:
                self.stores[k] = [self._store_sum(info) for info in layer.stores]
                if not self.by_layer:
                    self._make_accumulators(layer, template, programs)
            if first <= k <= last_layer and programs.vjp is not None and any(_takes_adjoint(template)):
                self.tiles.values[adjoint(k, last)] = self._last_adjoint(layer, template)

    def _make_accumulators(self, layer: Layer, template: Template, programs: TilePrograms) -> None:
        for i in programs.gradients:
            entry = template.inputs[i]
            if entry.kind is InputKind.PARAMETER and layer.parameters[entry.index] not in self.parameters:
                name = layer.parameters[entry.index]
                self.parameters[name] = self._accumulator(self.tiles.inputs.state[name])
            elif entry.kind is InputKind.SIDE and layer.sides[entry.index] not in self.sides:
                side = layer.sides[entry.index]
                self.sides[side] = self._accumulator(self.tiles.inputs.sides[side])

    def _accumulator(self, like: Tensor) -> Tensor:
        return self.tiles.zeros(like.shape, accumulation_dtype(like.dtype))

    def _store_sum(self, info: StoreInfo) -> Tensor | None:
        """Room for the cotangents that chunks send back to the keys or values of earlier ones."""
        steps = self.tiles.before + self.tiles.executable.plan.costs.seq_len
        return self.tiles.zeros(info.shape(steps), accumulation_dtype(info.dtype)) if info.wanted else None

    def _last_adjoint(self, layer: Layer, template: Template) -> Held:
        """The cotangent of the final state where the model returns it, else zeros."""
        held: Held = []
        for wanted, info in zip(_takes_adjoint(template), layer.carries, strict=True):
            given = self.given.finals[info.final] if info.final is not None else None
            if given is not None and info.windowed is not None:
                raise RuntimeError(
                    f"the final state of {layer.name} takes a gradient, which adjoint_window can't cut to a window: "
                    "detach the final state, or use adjoint_window=None"
                )
            made = self.tiles.zeros(info.adjoint_shape, info.dtype) if wanted else None
            held.append(made if made is None or given is None else made.copy_(given))
        return held

    def vjp(self, k: int, chunk: int) -> None:
        """Run the VJP of tile (k, chunk)."""
        if k > self.active_top:
            self._skip(k, chunk)
            return
        layer, template = self.tiles.layer(k)
        programs = self.tiles.executable.tile(k, chunk)
        if programs.vjp is None:
            raise RuntimeError(f"layer {layer.name} has no VJP, but the plan asks for one")
        if self.by_layer:
            self._make_accumulators(layer, template, programs)
        values = self.tiles.values
        arguments = self.tiles.arguments(k, chunk, programs.reads)
        arguments += [present(values[stream(k, chunk)][0]) for _ in programs.reads_outputs]
        arguments += [present(saved) for saved in values.pop(keep(k, chunk))]
        arguments += [self.cotangent(k, chunk, i) for i in programs.cotangents]
        gradients = self.accumulators(k, chunk, self.tiles.span(chunk))
        results = self.tiles.run(k, programs.vjp, arguments, programs.reads, gradients)
        self._store(k, chunk, results, programs)

    def publish(self, k: int) -> None:
        """Give gradients to which layer `k` was the last to add the dtype of their parameters, where they come by layer."""
        for name, layers in list(self.unpublished.items()):
            layers.discard(k)
            if layers:
                continue
            del self.unpublished[name]
            made = self.parameters[name].to(self.tiles.inputs.state[name].dtype)
            if made is not self.parameters[name]:
                self.tiles.tracker.track(made)
            self.parameters[name] = made

    def accumulators(self, k: int, chunk: int, span: tuple[int, int]) -> list[Tensor | None]:
        """By gradient number: where the gradient of a parameter, of some steps of a side, or of the keys before the chunk is
        added; None for streams and carries.
        """
        layer, template = self.tiles.layer(k)
        found: list[Tensor | None] = []
        for i in self.tiles.executable.tile(k, chunk).gradients:
            entry = template.inputs[i]
            if entry.kind is InputKind.PARAMETER:
                found.append(self.parameters[layer.parameters[entry.index]])
            elif entry.kind is InputKind.SIDE:
                side = layer.sides[entry.index]
                axis = self.stack.sides[side].axis
                found.append(self.sides[side] if axis is None else self.tiles.window(self.sides[side], axis, span))
            elif entry.kind is InputKind.PAST:
                found.append(self.tiles.past(present(self.stores[k][entry.index]), span))
            else:
                found.append(None)
        return found

    def _store(self, k: int, chunk: int, results: Results, programs: TilePrograms) -> None:
        """Put g[k-1,chunk] and lam[k,chunk-1] where the next VJPs look; at the first chunk, gradients of initial states."""
        layer, template = self.tiles.layer(k)
        wanted = [template.inputs[i] for i in programs.gradients]
        travelling = [entry for entry in wanted if entry.kind in (InputKind.STREAM, InputKind.CARRY)]
        held: Held = [None] * len(layer.carries)
        costs = self.tiles.executable.plan.costs
        for entry, result in zip(travelling, results, strict=True):
            if entry.kind is InputKind.STREAM:
                if costs.makes_cotangent(k, chunk):
                    self.tiles.values[cotangent(k - 1, chunk)] = [result]
            else:
                held[entry.index] = result
        if layer.carries:
            self.tiles.values[adjoint(k, chunk - 1)] = held
            if self.tiles.inputs.adjoint_norms:
                self.norms.note(k, chunk, held)
        if chunk == 0:
            self._add_initial(layer, held)

    def _add_initial(self, layer: Layer, held: Held) -> None:
        for info, result in zip(layer.carries, held, strict=True):
            wanted = info.initial is not None and self.tiles.inputs.initial[info.initial].requires_grad
            if info.initial is not None and wanted and result is not None:
                known = self.initial.get(info.initial)
                share = result if info.windowed is None else self._state_part(info, result)
                self.initial[info.initial] = share if known is None else known.add_(share)

    def _state_part(self, info: CarryInfo, adjoint: Tensor) -> Tensor:
        """The cotangent of the state in a windowed adjoint state, on its own."""
        made = self.tiles.zeros(info.shape, info.dtype)
        return made.copy_(adjoint[:, : made[0].numel()].view(info.shape))

    def _stream_cotangent(self, k: int, chunk: int, keep: bool) -> Tensor | None:
        """g[k,chunk], given up by the last tile that reads it (unless it is to `keep`); None where nothing flowed."""
        costs = self.tiles.executable.plan.costs
        value = cotangent(costs.cotangent_of(k), chunk)
        last = not keep and (not costs.shares_cotangent or not costs.tile(k, chunk).passes_cotangent)
        return (self.tiles.values.pop(value, [None]) if last else self.tiles.values.get(value, [None]))[0]

    def cotangent(self, k: int, chunk: int, i: int, *, keep: bool = False) -> Tensor:
        """The cotangent of output i of a tile; zeros where nothing flowed. keep: the tile's own VJP reads it afterwards."""
        layer, template = self.tiles.layer(k)
        entry = template.outputs[i]
        match entry.kind:
            case OutputKind.STREAM:
                given = self._stream_cotangent(k, chunk, keep)
                return self.tiles.stream_zeros(k, chunk) if given is None else given
            case OutputKind.CARRY:
                info = layer.carries[entry.index]
                given = self.tiles.values[adjoint(k, chunk)][entry.index]
                return self.tiles.zeros(info.adjoint_shape, info.dtype) if given is None else given
            case OutputKind.SUM:
                index = layer.sums[entry.index]
                given = self.given.sums[index]
                like = self.outputs.sums[index]
                return self.tiles.zeros(like.shape, like.dtype) if given is None else given
            case OutputKind.OUT:
                index = layer.outs[entry.index]
                whole, axis = self.given.outs[index], self.stack.outs[index].axis
                if whole is not None:
                    return self.tiles.slice(whole, axis, self.tiles.span(chunk))
                like = self.tiles.slice(self.outputs.outs[index], axis, self.tiles.span(chunk))
                return self.tiles.zeros(like.shape, like.dtype)
            case OutputKind.STORED:
                sent = self.tiles.own(present(self.stores[k][entry.index]), self.tiles.span(chunk))
                return self.tiles.zeros(sent.shape, layer.stores[entry.index].dtype).copy_(sent)

    def _skip(self, k: int, chunk: int) -> None:
        """No cotangent reaches this tile: drop what was kept for it, hand on nothing."""
        values = self.tiles.values
        values.pop(keep(k, chunk), None)
        values.pop(cotangent(k, chunk), None)
        held = values.get(adjoint(k, chunk))
        if held is not None:
            values[adjoint(k, chunk - 1)] = held

    def adjoint_norms(self) -> Tensor:
        """Norms of the adjoint states, (layers with a state, chunks) float32 on the CPU; zeros where no gradient came."""
        layers = [k for k, layer in enumerate(self.stack.layers) if layer.carries]
        return self.norms.matrix(layers, self.tiles.executable.plan.costs.chunk_count)

    def gradients(self) -> StepGradients:
        """Everything that was added up."""
        return StepGradients(
            {name: self.parameters.get(name) for name in self.tiles.inputs.state},
            [self.sides.get(i) for i in range(len(self.stack.sides))],
            [self.initial.get(i) for i in range(self.stack.initial_count)],
        )


def _takes_adjoint(template: Template) -> list[bool]:
    """For each carry, whether a cotangent travels for it."""
    return [o.differentiable for o in template.outputs if o.kind is OutputKind.CARRY]
