"""The paper's counts beside what compiled plans of its model do."""

from __future__ import annotations

from typing import Any

import torch
from example import PaperModel

import adjcomp
from adjcomp.ir.actions import Adjoint, HeadVjp

N, P, K, T, WINDOW = 4, 32, 4, 4_096, 256


def counts() -> list[dict[str, Any]]:
    """One row a form of the gradient: what the paper counts, and what a plan on this computer runs."""
    model = PaperModel("diagonal", N, P, K)
    ids = torch.zeros(1, T, dtype=torch.int64)
    rows = []
    for name, window, coupling in (("exact", None, "exact"), ("residual", None, "residual"), ("truncated", WINDOW, "residual")):
        costs = adjcomp.vjp_costs("diagonal", N=N, P=P, T=T, K=K, adjoint_window=window)
        plan = adjcomp.plan(
            model,
            seq_len=T,
            example_inputs=(ids, ids),
            adjoint_window=window,
            coupling=coupling,
            chunk=512,
            options=adjcomp.Options(solver_time_limit_seconds=0.0),
        )
        vjps = [action for action in plan.actions if isinstance(action, Adjoint | HeadVjp)]
        layers = [a for a in vjps if isinstance(a, Adjoint) and 0 < a.layer < plan.costs.head]
        flops = sum(plan.costs.tile(a.layer, a.chunk).adjoint_flops for a in layers)
        rows.append(
            {"form": name, "window": window, "pairs": K * costs.vjps_truncated, "pair_flops": costs.flops_truncated}
            | {"summed_flops": costs.flops_summed, "tiles": len(layers), "tile_flops": flops, "stored": costs.listed_bytes}
            | {"peak": max(plan.peak_bytes.values()), "adjoint": plan.costs.tile(1, 0).adjoint_bytes}
        )
        print(rows[-1], flush=True)
    return rows
