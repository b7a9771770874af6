"""`adjcomp.explain`: what was found in a model, in words: the stack, its tiles, what they hand on and what they keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from adjcomp.ir.stack import InputKind, Layer, OutputKind, ResidualStack, Template
from adjcomp.offline import Example, capture_example
from adjcomp.passes.carried import CARRIED_OPS
from adjcomp.passes.pipeline import Captured
from adjcomp.passes.programs import tile_programs
from adjcomp.passes.split import KeepPolicy
from adjcomp.units import format_bytes

SEQ_LEN = 4096


@dataclass(frozen=True)
class State:
    """One tensor that a layer hands from a chunk to the next."""

    op: str  # the op that carries it: "selective_scan"
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers with one tile function.

    lean, full: bytes a token that a tile keeps for its VJP when it keeps what is dear to make, or everything; None without a VJP.
    """

    names: tuple[str, ...]
    template: int
    parameters: int  # numbers in the parameters of one of the layers
    states: tuple[State, ...]
    lean: float | None
    full: float | None
    reads: tuple[str, ...]  # what a lean VJP reads beside what was kept: "input", "output", "border"
    key_bytes: int = 0  # of attention's keys and values a token, kept over the whole sequence in each of the layers

    @property
    def border_bytes(self) -> int:
        """Bytes that one of the layers hands from chunk to chunk."""
        return sum(state.bytes for state in self.states)


@dataclass(frozen=True)
class Explanation:
    """What adjcomp found in a model; print it. sides, outputs: one line of text each."""

    model: str
    batch_size: int
    d_model: int
    dtype: str  # of the parameters; what is kept is counted in numbers of this dtype
    itemsize: int
    residual_dtype: str
    groups: tuple[LayerGroup, ...]
    sides: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def layer_count(self) -> int:
        """Layers between stem and head."""
        return sum(len(group.names) for group in self.groups) - 2

    @property
    def template_count(self) -> int:
        """Distinct tile functions."""
        return len({group.template for group in self.groups})

    @property
    def border_bytes(self) -> int:
        """Bytes of the states of all layers at one chunk border."""
        return sum(group.border_bytes * len(group.names) for group in self.groups)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(part) for part in (_summary(self), _layers(self), _states(self), _around(self)))


def explain(
    model: torch.nn.Module, example_inputs: Example | None = None, batch_size: int = 1, seq_len: int = SEQ_LEN
) -> Explanation:
    """What adjcomp finds in a model: stem, layers and head, their states, what a tile keeps, sides and outputs. Nothing is run.

    Args:
        model: the module; the meta device will do.
        example_inputs: arguments (tuple or dict) where forward isn't `(input_ids, labels)`.
        batch_size, seq_len: of the call that is looked at, where no example is given.

    Raises CaptureError where the model can't be captured.
    """
    if seq_len < 1 or batch_size < 1:
        raise ValueError(f"batch_size and seq_len must be at least 1, not {batch_size} and {seq_len}")
    call, captured = capture_example(model, batch_size, seq_len, example_inputs)
    stack = captured.stack
    stream = _results(stack.templates[stack.layers[0].template])[0][1]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())
    return Explanation(
        model=type(model).__name__,
        batch_size=batch_size if example_inputs is None else int(stream.shape[0]),
        d_model=int(stream.shape[-1]),
        dtype=_short(dtype),
        itemsize=dtype.itemsize,
        residual_dtype=_short(_results(stack.templates[stack.layers[-2].template])[0][1].dtype),
        groups=_groups(captured, sizes, call.seq_len),
        sides=tuple(_side(stack, i) for i in range(len(stack.sides))),
        outputs=_outputs(captured),
    )


def _groups(captured: Captured, sizes: dict[str, int], seq_len: int) -> tuple[LayerGroup, ...]:
    """Runs of layers that share a template."""
    stack = captured.stack
    runs: list[list[Layer]] = []
    for layer in stack.layers:
        if runs and runs[-1][0].template == layer.template:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    length = min(SEQ_LEN, seq_len)
    splits = {policy: captured.splits(policy) for policy in KeepPolicy}
    found = []
    for run in runs:
        index = run[0].template
        template = stack.templates[index]
        lean, full = (tile_programs(template, splits[policy][index], length) for policy in (KeepPolicy.LEAN, KeepPolicy.FULL))
        kinds = {template.inputs[i].kind for i in lean.reads}
        flags = {"input": InputKind.STREAM in kinds, "output": bool(lean.reads_outputs), "border": InputKind.CARRY in kinds}
        found.append(
            LayerGroup(
                names=tuple(layer.name for layer in run),
                template=index,
                parameters=sum(sizes.get(name, 0) for name in run[0].parameters),
                states=_carries(template),
                lean=None if lean.vjp is None else lean.saved_bytes / length,
                full=None if full.vjp is None else full.saved_bytes / length,
                reads=tuple(word for word, read in flags.items() if read),
                key_bytes=sum(torch.Size(info.shape(1)).numel() * info.dtype.itemsize for info in run[0].stores),
            )
        )
    return tuple(found)


def _results(template: Template) -> list[tuple[OutputKind, Any, fx.Node]]:
    """Kind, fake tensor and node of every output of a template."""
    nodes = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
    return [(o.kind, n.meta["val"], n) for o, n in zip(template.outputs, nodes, strict=True)]


def _carries(template: Template) -> tuple[State, ...]:
    states = []
    for kind, value, node in _results(template):
        if kind is OutputKind.CARRY:
            shape = tuple(int(size) for size in value.shape)
            states.append(State(_carrier(node), shape, _short(value.dtype), torch.Size(shape).numel() * value.dtype.itemsize))
    return tuple(states)


def _carrier(node: fx.Node) -> str:
    """The carried op that a state comes from."""
    found = node
    while found.target not in CARRIED_OPS and found.all_input_nodes:
        found = found.all_input_nodes[0]
    return str(found.target).split(".")[1] if found.target in CARRIED_OPS else "state"


def _side(stack: ResidualStack, index: int) -> str:
    """A side in words: what it is made from, its shape."""
    graph = stack.prologue.graph
    node = next(n for n in graph.nodes if n.op == "output").args[0][index]
    names = dict(zip([n.name for n in graph.nodes if n.op == "placeholder"], stack.placeholder_names, strict=True))
    value = node.meta["val"]
    origin = names[node.name] if node.name in names else "made from " + (", ".join(_sources(node, names)) or "nothing")
    gradient = ", carries a cotangent" if stack.sides[index].differentiable else ""
    return f"{origin}: {_shape(value)} {_short(value.dtype)}{gradient}"


def _sources(node: fx.Node, names: dict[str, str]) -> list[str]:
    """The placeholders that a node is computed from, in their order."""
    seen, left = {node}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                left.append(source)
    found = {n.name for n in seen}
    return [name for placeholder, name in names.items() if placeholder in found]


def _outputs(captured: Captured) -> tuple[str, ...]:
    """Each output tensor of the model: its place in the output, its shape, or that it isn't made."""
    traced, stack = captured.traced, captured.stack
    nodes = next(n for n in traced.graph.graph.nodes if n.op == "output").args[0]
    leaves = [-1 if leaf.tensor is None else leaf.tensor for leaf in traced.output_leaves]
    tree = pytree.tree_unflatten(leaves, traced.output_spec)
    lines = []
    for path, index in pytree.tree_flatten_with_path(tree)[0]:
        if index >= 0:
            value, dropped = nodes[index].meta["val"], index in stack.dropped_outputs
            what = "not made, as a loss is returned" if dropped else f"{_shape(value)} {_short(value.dtype)}"
            lines.append(f"{re.sub(r'[^A-Za-z0-9_.]', '', pytree.keystr(path)) or 'the output'}: {what}")
    return (*lines, *(f"{name}: updated in the forward" for name in stack.updates))


def _shape(value: Any) -> str:
    return "(" + ", ".join(str(size) if isinstance(size, int) else "T" for size in value.shape) + ")"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(found: Explanation) -> list[str]:
    layers = sum(len(group.names) for group in found.groups)
    return [
        f"{found.model}: a residual stack of {found.layer_count} layers between stem and head, d_model {found.d_model}",
        f"  parameters in {found.dtype}, residual stream in {found.residual_dtype}, batch size {found.batch_size}, any length T",
        f"  {found.template_count} tile functions serve {layers} layers; layers with the same letter share one",
    ]


def _layers(found: Explanation) -> list[str]:
    """Tiles and what they keep."""
    unit = found.d_model * found.itemsize * found.batch_size
    lines = [
        "Tiles (kept: for the backward, a token, in units of d_model; what is dear to make alone / everything the VJP reads)",
        f"  {'layers':<34}{'':<4}{'parameters':>12}  {'border':>11}  {'kept':>14}  VJP also reads",
    ]
    for group in found.groups:
        kept = "no gradient" if group.lean is None or group.full is None else f"{group.lean / unit:.1f} / {group.full / unit:.1f}"
        border = format_bytes(group.border_bytes) if group.states else "-"
        place = f"{_names(group.names):<34}{_letter(group.template):<4}{_count(group.parameters):>12}"
        lines.append(f"  {place}  {border:>11}  {kept:>14}  {', '.join(group.reads) or '-'}")
    return lines


def _states(found: Explanation) -> list[str]:
    """What goes from chunk to chunk."""
    lines = ["From chunk to chunk"]
    for group in {group.template: group for group in found.groups}.values():
        letter = _letter(group.template)
        lines += [f"  {letter}: {s.op} {s.shape} {s.dtype}, {format_bytes(s.bytes)}" for s in group.states]
        if group.key_bytes:
            lines.append(f"  {letter}: causal_attention, keys and values of all tokens: {format_bytes(group.key_bytes)} a token")
    return [*lines, f"  one border of all layers: {format_bytes(found.border_bytes)}"]


def _around(found: Explanation) -> list[str]:
    sides = [f"  {side}" for side in found.sides] or ["  nothing"]
    return ["Read from the side, a chunk at a time", *sides, "Outputs", *(f"  {line}" for line in found.outputs)]


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition('.')[2]} ({len(names)})"


def _letter(template: int) -> str:
    return chr(ord("A") + template) if template < 26 else f"T{template}"


def _count(numbers: int) -> str:
    for scale, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if numbers >= scale:
            return f"{numbers / scale:.1f} {unit}"
    return str(numbers)
