"""Mixtures of experts as transformers spell them: every token goes to the experts that its router chose.

Their implementations walk over the experts that are hit, or sort the tokens of the whole sequence; here each choice is a row of a
grouped product (`adjcomp.ops.grouped_linear`), so that a token's output depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from adjcomp import ops
from adjcomp.errors import CaptureError


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Σ over a token's choices of weight · expert(token), as `grouped_mm_experts_forward` has it.

    hidden_states: (tokens, D). top_k_index, top_k_weights: (tokens, choices). Returns (tokens, D) in the dtype of hidden_states.
    """
    if experts._is_expert_parallel:
        raise CaptureError("experts that are spread over ranks aren't captured: keep all experts of a layer on one device")
    tokens, width = hidden_states.shape
    choices, group = top_k_index.shape[1], top_k_index.reshape(-1)
    rows = hidden_states[:, None].expand(tokens, choices, width).reshape(tokens * choices, width)
    if experts.has_gate:
        inner = experts._apply_gate(_linear(experts, "gate_up_proj", rows, group))
    else:
        inner = experts.act_fn(_linear(experts, "up_proj", rows, group))
    out = _linear(experts, "down_proj", inner, group)
    if experts.has_post_expert_norm:
        out = experts.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1)[:, None]
    return weighted.reshape(tokens, choices, width).sum(1).to(hidden_states.dtype)


def _linear(experts: Any, name: str, rows: Tensor, group: Tensor) -> Tensor:
    weight: Tensor = getattr(experts, name)
    y = ops.grouped_linear(rows.to(weight.dtype), weight if experts.is_transposed else weight.transpose(1, 2), group)
    return y + functional.embedding(group, getattr(experts, f"{name}_bias")) if experts.has_bias else y


def experts_interface(table: object, implementation: str, default: Callable[..., Any]) -> Callable[..., Tensor]:
    """In the place of `ExpertsInterface.get_interface`: one implementation, whatever is asked for."""
    return experts_forward
