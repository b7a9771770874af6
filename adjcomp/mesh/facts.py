"""What ranks compare before they work: everything that a step depends on, as text, one fact a line."""

from __future__ import annotations

import hashlib

import torch

from adjcomp.ir.plan import Plan
from adjcomp.passes.calls import CallTensors
from adjcomp.passes.pipeline import Captured


def call_facts(model: torch.nn.Module, call: CallTensors, captured: Captured, saved: Plan | None) -> str:
    """Inputs, parameters, captured tiles and a saved plan. Not the values of inputs: a rank may have read its tokens only."""
    lines = [f"torch {torch.__version__}", f"model {type(model).__qualname__}"]
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    for entry, tensor in zip(call.inputs, tensors, strict=True):
        lines.append(f"input {entry.path}: {_kind(tensor)}")
    lines += [f"argument {leaf!r}" for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
    lines += [f"parameter {name}: {_kind(p)}" for name, p in model.named_parameters()]
    lines += [f"buffer {name}: {_kind(b)}" for name, b in model.named_buffers()]
    lines += [f"layer {layer.name}: tile {layer.template}" for layer in captured.stack.layers]
    lines += [f"tile {i}: {_digest(template.key)}" for i, template in enumerate(captured.stack.templates)]
    lines.append(f"gradients {'enabled' if torch.is_grad_enabled() else 'disabled'}")
    lines.append(f"gradient: {captured.stack.variant}")
    lines.append(f"saved plan: {'none' if saved is None else _digest(saved.to_json())}")
    return "\n".join(lines)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{', takes a gradient' if tensor.requires_grad else ''}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
