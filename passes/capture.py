"""Trace a model, whole and unmodified, to one ATen graph in which only time is symbolic.

`torch.fx.symbolic_trace` cannot follow the models of this field; `make_fx` on fake tensors can. Parameters and buffers enter as
inputs, sequence kernels become `adjcomp.ops` nodes (see `lowering`), and what autograd does
beside the arithmetic is either recorded on the nodes (`no_grad` regions) or refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree

from adjcomp.errors import CaptureError
from adjcomp.passes import attention
from adjcomp.passes.calls import CallTensors, InputTensor, describe_call
from adjcomp.passes.lowering import kernels_as_ops
from adjcomp.passes.lowering_layers import layers_as_ops, without_caches
from adjcomp.passes.provenance import Provenance, refuse_modules
from adjcomp.passes.quiet import quiet
from adjcomp.passes.substitute import check_attributes, reassigned_buffers, substituted

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
    reassigned: buffers to which forward assigns a new tensor; their values are the last outputs of the graph.
    guards: conditions on time under which the graph is the model.
    """

    graph: fx.GraphModule
    time: Any
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    inputs: tuple[InputTensor, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[OutputLeaf, ...]
    reassigned: tuple[str, ...]
    guards: tuple[Any, ...]


@dataclass(frozen=True)
class OutputLeaf:
    """A leaf of the output structure: `tensor` indexes the graph's outputs; None means the constant `value`."""

    tensor: int | None
    value: object = None


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    hint: int | None = None,
    shapes: Mapping[str, torch.Tensor] | None = None,
) -> TracedModel:
    """Trace `model(*args, **kwargs)`; neither the model nor any tensor is touched, also when this fails.

    hint: the length at which branches on the length are decided. shapes: meta tensors like the parameters and buffers, by name,
    of which the whole isn't here.

    Raises CaptureError (a ValueError) naming the module, the op and the source line of what cannot be captured.
    """
    refuse_modules(model)
    call = describe_call(args, kwargs)
    with _CAPTURE_LOCK, kernels_as_ops(), layers_as_ops(), without_caches(model), quiet():
        try:
            return _Tracer(model, call, hint or TIME_HINT, shapes or {}).run()
        except CaptureError:
            if not call.doubtful():
                raise
            return _Tracer(model, call.without_doubtful_times(), hint or TIME_HINT, shapes or {}).run()


class _TimeShapes(ShapeEnv):
    """Refuses a model that turns the sequence length into a number, at the place where it does.

    Whether a size such as T - 1 is zero or one decides inside of an operation how it computes (may a slice be viewed, or must it
    be copied?), never what: the general way is taken, or one and two tokens would need traces of their own. The model's own
    branches are decided as they stand at the hint, and noted in `asked`: torch takes a size for at least two without a word.
    """

    def __init__(self, provenance: Provenance, hint: int) -> None:
        super().__init__(specialize_zero_one=hint > 1)
        self.provenance = provenance
        self.hint = hint
        self.asked: dict[Any, None] = {}

    def evaluate_expr(self, orig_expr: Any, *given: Any, **options: Any) -> Any:
        """The value of a condition on sizes."""
        condition = isinstance(orig_expr, sympy.logic.boolalg.Boolean) and orig_expr.free_symbols
        if not condition or free_unbacked_symbols(orig_expr):
            return super().evaluate_expr(orig_expr, *given, **options)
        if self.provenance.operating:
            if isinstance(orig_expr, sympy.Eq | sympy.Ne) and not {sympy.S.Zero, sympy.S.One}.isdisjoint(orig_expr.args):
                return sympy.S(isinstance(orig_expr, sympy.Ne))
            return super().evaluate_expr(orig_expr, *given, **options)
        lone = self.hint == 1  # torch would put the number in the symbol's place
        found = orig_expr.subs(self.backed_var_to_val) if lone else super().evaluate_expr(orig_expr, *given, **options)
        self.asked[orig_expr if found else sympy.Not(orig_expr)] = None
        return found

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        raise CaptureError(
            f"{self.provenance.here()}: the model fixes the sequence length while it runs ({a} = {tgt}): "
            "a Python loop over time, or a size written as a number. Write a recurrence with adjcomp.ops (linear_scan, "
            "selective_scan, ssd …), and sizes as x.shape[1]"
        )


class _Fakes:
    """Fake tensors over one time symbol."""

    def __init__(self, provenance: Provenance, hint: int) -> None:
        self.env = _TimeShapes(provenance, hint)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        seed = self.mode.from_tensor(
            torch.empty(hint, device="meta"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        )
        self.time = seed.shape[0]

    def parameter(self, tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        """A stand-in for a parameter or buffer; `like` what it is as a whole, where that isn't here."""
        if like is not None:
            with self.mode:
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=tensor.device)
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def input(self, tensor: torch.Tensor, time_dim: int | None) -> torch.Tensor:
        """A stand-in for an input, with the symbol where time is."""
        sizes = [self.time if dim == time_dim else size for dim, size in enumerate(tensor.shape)]
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


class _Tracer:
    """One capture in progress."""

    def __init__(self, model: torch.nn.Module, call: CallTensors, hint: int, shapes: Mapping[str, torch.Tensor]) -> None:
        self.model = model
        self.shapes = shapes
        self.call = call
        self.provenance = Provenance(model)
        self.fakes = _Fakes(self.provenance, hint)
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.leaves: list[Any] = []
        self.spec: pytree.TreeSpec | None = None
        self.reassigned: tuple[str, ...] = ()

    def run(self) -> TracedModel:
        tensors = [leaf for leaf in self.call.leaves if isinstance(leaf, torch.Tensor)]
        state = {**self.parameters, **self.buffers}
        stand_ins = [self.fakes.parameter(t, self.shapes.get(name)) for name, t in state.items()]
        inputs = [self.fakes.input(t, i.time_dim) for t, i in zip(tensors, self.call.inputs, strict=True)]
        graph = self._traced([*stand_ins, *inputs])
        _lift_constants(graph, self.fakes.mode)
        _check_embeddings(graph.graph)
        assert self.spec is not None
        return TracedModel(
            graph=graph,
            time=self.fakes.time.node.expr,  # type: ignore[attr-defined]
            parameter_names=tuple(self.parameters),
            buffer_names=tuple(self.buffers),
            inputs=self.call.inputs,
            output_spec=self.spec,
            output_leaves=_index_leaves(self.leaves),
            reassigned=self.reassigned,
            guards=tuple(dict.fromkeys([*(guard.expr for guard in self.fakes.env.guards), *self.fakes.env.asked])),
        )

    def forward(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """What is traced: parameters, buffers, inputs -> output tensors, then new values of the buffers that forward
        reassigns.
        """
        state = [*self.parameters.values(), *self.buffers.values()]
        rest = iter(flat[len(state) :])
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        given = dict(zip(self.buffers, flat[len(self.parameters) : len(state)], strict=True))
        with substituted(self.model, {id(t): stand_in for t, stand_in in zip(state, flat, strict=False)}):
            before = {id(m): dict(vars(m)) for m in self.model.modules()}
            with self.provenance.observed():
                # Not the call itself: hooks of the root module run around a compiled call.
                result = self.model.forward(*args, **kwargs)
            check_attributes(self.model, before)
            changed = reassigned_buffers(self.model, given)
        self.leaves, self.spec = _flatten_output(result)
        self.reassigned = tuple(changed)
        return [*(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)), *changed.values()]

    def _traced(self, inputs: list[torch.Tensor]) -> fx.GraphModule:
        try:
            # Oblivious: a size such as T - 1 is no reason to branch on its being one.
            oblivious = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
            with oblivious, self.fakes.mode, enable_python_dispatcher(), torch.enable_grad():
                return make_fx(self.forward, _allow_non_fake_inputs=True)(*inputs)
        except CaptureError:
            raise
        except attention.Refused as error:
            raise CaptureError(f"{self.provenance.last_place()}: {error}") from error
        except GuardOnDataDependentSymNode as error:
            raise CaptureError(
                f"{self.provenance.last_place()}: a branch or a size that depends on the values of a tensor cannot be "
                "captured; use torch.where, or compute it outside of forward"
            ) from error
        except Exception as error:
            place = self.provenance.last_place()
            raise CaptureError(f"the model cannot be traced: {place}: {type(error).__name__}: {_first_line(error)}") from error


def _lift_constants(graph: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Numbers read from tensors are refused. Tensors that are neither parameters, buffers nor inputs stay constants of the
    graph; one that wants a gradient is refused.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError(
                f"{node.meta.get('where', 'the root module')}: a number is read from a tensor, "
                "which would be fixed at capture. Keep it a tensor"
            )
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if constant.requires_grad:
                raise CaptureError(
                    f"forward reads a tensor of shape {tuple(constant.shape)} that requires grad but is no registered parameter "
                    "of the model: assign it as an nn.Parameter, or pass it as an argument"
                )
            node.meta.setdefault("val", mode.from_tensor(constant, static_shapes=True))


def _check_embeddings(graph: fx.Graph) -> None:
    """Rows are looked up by integers; some versions of torch find out only when the lookup runs."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        dtype = node.args[1].meta["val"].dtype  # type: ignore[union-attr]
        if dtype not in (torch.int64, torch.int32):
            raise CaptureError(
                f"{node.meta.get('where', 'the root module')}: an embedding looks up rows by {dtype} numbers. "
                "Pass token ids as int64 or int32"
            )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _flatten_output(result: object) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float | bool | str | type(None)):
            name = type(leaf).__name__
            raise CaptureError(
                f"the model's output holds a {name}: a training step makes no inference cache, so leave use_cache out or False"
                if name.endswith("Cache")
                else f"the model's output holds a {name}; outputs may be tensors and plain values in dicts, tuples, lists and "
                "dataclasses registered with torch.utils._pytree"
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
