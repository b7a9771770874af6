"""The VJP of a tile function as explicit nodes: one joint graph of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from adjcomp.ir.interpret import GradInterpreter
from adjcomp.ir.stack import InputKind, OutputKind, Template
from adjcomp.passes.adjoint_window import cut_to_window
from adjcomp.passes.cleanup import tidy
from adjcomp.passes.norms import add_residual_cotangents
from adjcomp.passes.products import add_in_products


@dataclass(frozen=True)
class JointGraph:
    """Forward and VJP of one template.

    graph: placeholders are the template's inputs, then one cotangent for each output in `cotangents`; outputs are the template's
    outputs, then one gradient for each input in `gradients`.
    """

    template: Template
    graph: fx.Graph
    cotangents: tuple[int, ...]  # indices of template outputs that take a cotangent
    gradients: tuple[int, ...]  # indices of template inputs whose gradient comes out

    def cotangent_values(self) -> list[tuple[int, torch.Tensor]]:
        """Template output and fake value of each cotangent that comes in."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        values = [n.meta["val"] for n in placeholders[len(self.template.inputs) :]]
        return list(zip(self.cotangents, values, strict=True))

    @property
    def hands_cotangent_on(self) -> bool:
        """Whether the gradient of x[k-1,c] is the cotangent of x[k,c] as it came in."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"][len(self.template.inputs) :]
        results = list(next(n for n in self.graph.nodes if n.op == "output").args[0])[len(self.template.outputs) :]
        tangents = [
            n for n, i in zip(placeholders, self.cotangents, strict=True) if self.template.outputs[i].kind is OutputKind.STREAM
        ]
        streams = [n for n, i in zip(results, self.gradients, strict=True) if self.template.inputs[i].kind is InputKind.STREAM]
        return len(streams) == 1 and streams == tangents


def differentiate(template: Template) -> JointGraph | None:
    """Trace the VJP of a template; None where no input wants a gradient."""
    gradients = tuple(i for i, entry in enumerate(template.inputs) if entry.differentiable)
    cotangents = tuple(i for i, entry in enumerate(template.outputs) if entry.differentiable)
    if not gradients or not cotangents:
        return None
    placeholders = [n for n in template.graph.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["val"] for n in placeholders]
    results = next(n for n in template.graph.graph.nodes if n.op == "output").args[0]
    mode = next(v.fake_mode for v in fakes)
    found: list[bool] = []

    def joint(inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(i in gradients) for i, x in enumerate(inputs)]
        outputs = GradInterpreter(template.graph).run(*leaves)
        reached = [(outputs[i], t) for i, t in zip(cotangents, tangents, strict=True) if outputs[i].requires_grad]
        wanted = [leaves[i] for i in gradients]
        grads = (
            torch.autograd.grad([o for o, _ in reached], wanted, [t for _, t in reached], allow_unused=True)
            if reached
            else [None] * len(wanted)
        )
        found[:] = [g is not None for g in grads]
        return [*(o.detach() for o in outputs), *(g for g in grads if g is not None)]

    as_cast = (torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False))  # casts are in the graph already
    with mode, enable_python_dispatcher(), torch.enable_grad(), as_cast[0], as_cast[1]:
        tangents = [
            torch.empty(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype, device=n.meta["val"].device)
            for i, n in enumerate(results)
            if i in cotangents
        ]
        inputs = [torch.empty_strided(tuple(v.shape), v.stride(), dtype=v.dtype, device=v.device) for v in fakes]
        traced = make_fx(joint)(inputs, tangents)
    graph = tidy(traced.graph)
    if template.window is not None:
        cut_to_window(graph, template, cotangents)
    add_residual_cotangents(graph)
    add_in_products(graph, [n for n in graph.nodes if n.op == "placeholder"][len(template.inputs) :])
    reached = tuple(i for i, yes in zip(gradients, found, strict=True) if yes)
    return JointGraph(template, graph, cotangents, reached)
