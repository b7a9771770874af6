"""Which argument of a carried op takes the incoming state, and which output is the outgoing one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import adjcomp.ops  # noqa: F401  (declares the ops named below)


@dataclass(frozen=True)
class CarrySpec:
    """state_argument: name of the argument that takes s[k,c-1]. state_output: index of the output that is s[k,c]."""

    state_argument: str
    state_output: int


CARRIED_OPS: dict[Any, CarrySpec] = {
    torch.ops.adjcomp.linear_scan.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.dense_scan.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.selective_scan.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.ssd.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.gated_delta_rule.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.linear_attention.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.max_plus_scan.default: CarrySpec("h0", 1),
    torch.ops.adjcomp.logcumsumexp.default: CarrySpec("state", 1),
    torch.ops.adjcomp.causal_conv1d.default: CarrySpec("tail", 1),
}
ATTENTION = torch.ops.adjcomp.causal_attention.default  # its keys and values are kept over the whole sequence
LINEAR_CROSS_ENTROPY = torch.ops.adjcomp.linear_cross_entropy.default
COUNTER_UNIFORM = torch.ops.adjcomp.counter_uniform.default
