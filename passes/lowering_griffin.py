"""Griffin's recurrent block as RecurrentGemma has it: a convolution and a gated diagonal recurrence, beside a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adjcomp import ops
from adjcomp.errors import CaptureError

_STEEPEST = 1000.0  # transformers' bound on the derivative of the square root


def recurrent_block(
    original: Callable[..., Any],
    block: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    **rest: Any,
) -> Any:
    """input_states: (B, T, D). position_ids: (1 or B, T); the state starts anew where they are 0.

    Raises CaptureError with a cache: the original keeps states in attributes of its modules then.
    """
    if use_cache:
        raise CaptureError(
            f"{type(block).__name__} keeps an inference cache in attributes of its own: a training step makes none, so leave "
            "use_cache out or False"
        )
    x = block.conv_1d(block.linear_x(input_states).transpose(1, 2))[..., : input_states.shape[1]].transpose(1, 2)
    y = _gated_recurrence(block.rg_lru, x, position_ids[:, :, None] == 0)
    return block.linear_out(y * block.act_fn(block.linear_y(input_states))), None


def _gated_recurrence(unit: Any, x: Tensor, reset: Tensor) -> Tensor:
    """h[t] = a[t] h[t-1] + sqrt(1 - a[t]²) i[t] x[t], a = exp(-8 r softplus(Λ)), gates r and i sigmoids of x by heads."""
    enter, keep = (
        torch.sigmoid(_by_heads(x, weight, bias))
        for weight, bias in (
            (unit.input_gate_weight, unit.input_gate_bias),
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
        )
    )
    log_decay = -8.0 * keep * functional.softplus(unit.recurrent_param)
    scale = reset + ~reset * _bounded_sqrt(1 - torch.exp(2 * log_decay))
    driven = x * enter * scale.type(x.dtype)
    h, _ = ops.linear_scan((torch.exp(log_decay) * ~reset).float(), driven.float())
    return h.type(driven.dtype)


def _by_heads(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch, steps, width = x.shape
    rows = x.reshape(batch * steps, *weight.shape[:2]).permute(1, 0, 2)
    return torch.baddbmm(bias[:, None], rows, weight).transpose(0, 1).reshape(batch, steps, width)


def _bounded_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) whose derivative is 1 / sqrt(max(4 x, 1 / bound²)): below the bound a line that is moved onto the root."""
    least = 0.25 / _STEEPEST**2
    line = _STEEPEST * x
    return torch.where(x > least, torch.sqrt(x.clamp(min=least)), line + (torch.sqrt(x) - line).detach())
