"""Trace a model, whole and unmodified, to one ATen graph in which only time is symbolic.

`torch.fx.symbolic_trace` cannot follow the models of this field; `make_fx` on fake tensors can. Parameters and buffers enter as
inputs through `torch.func.functional_call`, sequence kernels become `adjcomp.ops` nodes (see `lowering`), and what autograd does
beside the arithmetic is either recorded on the nodes (`no_grad` regions) or refused by name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from adjcomp.errors import CaptureError
from adjcomp.passes.lowering import kernels_as_ops
from adjcomp.passes.provenance import Provenance, refuse_inner_hooks

TIME_HINT = 1031  # a prime, so that no other size of a model is mistaken for time
_CAPTURE_LOCK = threading.Lock()  # capture binds names of other modules; two captures at once would restore them wrongly


@dataclass(frozen=True)
class TracedModel:
    """One forward of a model as an ATen graph.

    graph: its placeholders are the parameters, the buffers, then the input tensors, in the order of the three tuples below; its
        output is the flat list of output tensors. Nodes carry `meta["val"]` (fake tensors over one symbol for time),
        `meta["where"]` (module path and source line) and `meta["no_grad"]`.
    time: the symbol that stands for the sequence length.
    inputs: one `InputTensor` a tensor input, in placeholder order.
    output_spec, output_leaves: the output structure; a leaf is an index into the graph's outputs or a constant.
    """

    graph: fx.GraphModule
    time: Any
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    inputs: tuple[InputTensor, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[OutputLeaf, ...]
    guards: tuple[Any, ...]


@dataclass(frozen=True)
class InputTensor:
    """A tensor among the call's arguments: its path ("input_ids", "args[0]"), and where time is (None: it has no time axis)."""

    path: str
    time_dim: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the output structure: `tensor` indexes the graph's outputs; None means the constant `value`."""

    tensor: int | None
    value: object = None


@dataclass(frozen=True)
class CallTensors:
    """The arguments of one call, flattened."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    inputs: tuple[InputTensor, ...]  # of the tensor leaves, in order
    batch_size: int
    seq_len: int


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallTensors:
    """Find the sequence length of a call: dimension 1 of the first tensor that has one.

    Another input has a time axis when it has the same batch size and length there; a 1-D integer input of that length is a list of
    positions. Raises ValueError for an empty sequence and for labels (or any integer input) whose length differs.
    """
    paths, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    leaves = tuple(leaf for _, leaf in paths)
    names = [_input_name(path) for path, _ in paths]
    sequences = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim >= 2]
    if not sequences:
        raise CaptureError(
            "the call has no tensor input with a batch and a time dimension: pass token ids (B, T) or a float sequence (B, T, D); "
            f"got {[f'{n}: {_describe(v)}' for n, v in zip(names, leaves, strict=True)] or 'no argument'}"
        )
    batch_size, seq_len = int(sequences[0].shape[0]), int(sequences[0].shape[1])
    if seq_len == 0 or batch_size == 0:
        raise ValueError(f"the input is empty: batch {batch_size}, sequence length T = {seq_len}; T and the batch must be at least 1")
    inputs = []
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            time_dim = _time_dim(leaf, batch_size, seq_len)
            _check_length(name, leaf, time_dim, batch_size, seq_len)
            inputs.append(InputTensor(name, time_dim, tuple(map(int, leaf.shape)), leaf.dtype))
    return CallTensors(leaves, spec, tuple(inputs), batch_size, seq_len)


def _describe(value: object) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _input_name(path: tuple[Any, ...]) -> str:
    kind, rest = path[0].idx, path[1:]
    if kind == 0:
        return "args" + pytree.keystr(rest)
    head = getattr(rest[0], "key", rest[0])
    return f"{head}{pytree.keystr(rest[1:])}"


def _time_dim(tensor: torch.Tensor, batch_size: int, seq_len: int) -> int | None:
    if tensor.ndim >= 2 and tensor.shape[0] == batch_size and tensor.shape[1] == seq_len:
        return 1
    if tensor.ndim == 1 and tensor.shape[0] == seq_len and not tensor.is_floating_point() and seq_len > 1:
        return 0
    return None


def _check_length(name: str, tensor: torch.Tensor, time_dim: int | None, batch_size: int, seq_len: int) -> None:
    integer = not tensor.is_floating_point() and not tensor.is_complex()
    if time_dim is None and integer and tensor.ndim == 2:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} where the sequence is (B, T) = ({batch_size}, {seq_len}): "
            "every integer input of two dimensions must have the batch and length of the sequence"
        )


def capture(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """Trace `model(*args, **kwargs)`; neither the model nor any tensor is touched, also when this fails.

    Raises CaptureError (a ValueError) naming the module, the op and the source line of what cannot be captured.
    """
    refuse_inner_hooks(model)
    call = describe_call(args, kwargs)
    provenance = Provenance(model)
    with _CAPTURE_LOCK, _module_state_restored(model), kernels_as_ops():
        return _trace(model, call, provenance)


@contextlib.contextmanager
def _module_state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Undo attribute assignments that a forward makes on its modules (a cached mask, a step counter)."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            if module.__dict__ != attributes:
                module.__dict__.clear()
                module.__dict__.update(attributes)


class _Fakes:
    """Fake tensors over one time symbol."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=False)
        seed = self.mode.from_tensor(
            torch.empty(TIME_HINT, device="meta"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        )
        self.time = seed.shape[0]

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def input(self, tensor: torch.Tensor, time_dim: int | None) -> torch.Tensor:
        sizes = [self.time if dim == time_dim else size for dim, size in enumerate(tensor.shape)]
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


def _trace(model: torch.nn.Module, call: CallTensors, provenance: Provenance) -> TracedModel:
    fakes = _Fakes()
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    fake_parameters = [fakes.parameter(p) for p in parameters.values()]
    fake_buffers = [fakes.parameter(b) for b in buffers.values()]
    fake_inputs = [fakes.input(t, i.time_dim) for t, i in zip(tensors, call.inputs, strict=True)]
    outputs: dict[str, Any] = {}

    def forward(*flat: torch.Tensor) -> list[torch.Tensor]:
        state = dict(zip([*parameters, *buffers], flat, strict=False))
        rest = iter(flat[len(state) :])
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        with provenance.observed():
            result = torch.func.functional_call(model, state, args, kwargs)
        outputs["leaves"], outputs["spec"] = _flatten_output(result)
        return [leaf for leaf in outputs["leaves"] if isinstance(leaf, torch.Tensor)]

    graph = _run_tracer(forward, fakes, (*fake_parameters, *fake_buffers, *fake_inputs), provenance)
    return TracedModel(
        graph=graph,
        time=fakes.time.node.expr,
        parameter_names=tuple(parameters),
        buffer_names=tuple(buffers),
        inputs=call.inputs,
        output_spec=outputs["spec"],
        output_leaves=_index_leaves(outputs["leaves"]),
        guards=_checked_guards(fakes.env),
    )


def _run_tracer(
    forward: Callable[..., list[torch.Tensor]], fakes: _Fakes, inputs: tuple[torch.Tensor, ...], provenance: Provenance
) -> fx.GraphModule:
    try:
        with fakes.mode, enable_python_dispatcher(), torch.enable_grad():
            return make_fx(forward)(*inputs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the model cannot be traced: {provenance.last_place()}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _flatten_output(result: object) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float | bool | str | type(None)):
            raise CaptureError(
                f"the model's output holds a {type(leaf).__name__}; outputs may be tensors and plain values in dicts, tuples, "
                "lists and dataclasses registered with torch.utils._pytree"
            )
    return leaves, spec


def _index_leaves(leaves: list[Any]) -> tuple[OutputLeaf, ...]:
    indexed, count = [], 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            indexed.append(OutputLeaf(count))
            count += 1
        else:
            indexed.append(OutputLeaf(None, leaf))
    return tuple(indexed)


def _checked_guards(env: ShapeEnv) -> tuple[Any, ...]:
    if env.replacements:
        fixed = ", ".join(f"T = {value}" for value in env.replacements.values())
        raise CaptureError(f"the model fixes the sequence length while it runs ({fixed}): its forward must work for any T")
    return tuple(guard.expr for guard in env.guards)
