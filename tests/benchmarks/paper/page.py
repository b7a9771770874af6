# ruff: noqa: E501 - a row of a table is one line
"""docs/paper.md and its figures, from the results of all parts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from charts import Axis, Line, write_chart
from memory import claims

import adjcomp

Results = dict[str, Any]
WAYS = {"backprop": "backprop, fused kernels", "checkpointing": "layer checkpointing", "paper": "the paper's stored states"}


def write_page(results: Results, docs: Path) -> None:
    """Draw the figures into docs/figures and write docs/paper.md."""
    sections = [
        _head(),
        _table_1(),
        _accounting(results["accounting"]),
        _figure_1(results["figure_1"]["rows"], results["measured"], docs),
        _claims(claims(results["figure_1"]["rows"]), results["figure_1"]["plans"]),
        _figure_6(results["timing"], docs),
        _coupling(results["errors"], docs),
        _windows(results["errors"], docs),
        _training(results["training"], docs),
        _closing(),
    ]
    (docs / "paper.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(value: float) -> str:
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.0f} B"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _head() -> str:
    return f"""# The paper, measured

adjcomp implements adjoint sharding ("Adjoint sharding for very long context training of state space models", arXiv 2501.00692).
This page has each of its systems and claims beside what comes out here. `make paper` writes it anew, figures included; no number in
a table or a figure was typed in. Every number is one of

- **measured**: by running it, here on {os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__.split("+")[0]}, no GPU, float32;
- **planned**: a plan's prediction (`adjcomp.plan`), or the smallest peak that a plan can have;
- **arithmetic**: a formula, with none of it run.

```python
adjcomp.compile(model)  # exact: the gradient of backpropagation, the default
adjcomp.compile(model, coupling="residual")  # Proposition 3: an approximation for more than one layer
adjcomp.compile(model, adjoint_window=2_000)  # Equation 7, truncated: an approximation
adjcomp.vjp_costs("diagonal", N=225, P=128, batch=8, T=10_000, K=100, adjoint_window=2_000)  # the paper's accounting
```

| the paper | here |
|---|---|
| Proposition 2: one layer's gradient as a double sum of VJPs | exact; computed with the sum over t taken first, in O(T). The double sum is a test |
| Proposition 3: the same in K layers, with dl/dy_K in every layer | not backpropagation for K > 1: `coupling="residual"`, marked as an approximation. The exact form carries dl/dy_k down the stream |
| Equation 7: truncated adjoint sharding | `adjoint_window=`, in O(T) by two scans over blocks; any chunk length, diagonal (real, complex), scalar, dense and delta-rule transitions |
| unstructured, diagonal and scalar transitions | [`examples/paper_model.py`](../examples/paper_model.py), any N, P, K |"""


def _table_1() -> str:
    rows = []
    for structure in ("unstructured", "diagonal", "scalar"):
        costs = adjcomp.vjp_costs(structure, N=225, P=128, batch=8, T=10_000, K=100, adjoint_window=2_000)
        for name, cost in (("𝒜", costs.a), ("ℬ", costs.b), ("𝒞", costs.c)):
            rows.append([structure, name, f"{cost.numbers:,}", f"{cost.flops:,}"])
    costs = adjcomp.vjp_costs("diagonal", N=225, P=128, batch=8, T=10_000, K=100, adjoint_window=2_000)
    return f"""## Table 1: one VJP (arithmetic)

N = 225, P = 128, a batch of 8; numbers of memory and FLOPs of one VJP at one pair of steps (t, i).

{_table(["transition", "network", "numbers", "FLOPs"], rows)}

The three VJPs of a diagonal layer together: {costs.flops_per_vjp:,} FLOPs, {_size(costs.bytes_per_vjp)} in half precision. The paper prints
1,798,144 FLOPs and 0.6 MB for this example, which its own table doesn't give. Of T = 10,000 steps with a window of 2,000 the full sums
have {costs.vjps_full:,} pairs and the truncated ones {costs.vjps_truncated:,}, {100 * costs.saved:.1f} % fewer: that is
T̄T − T̄(T̄ − 1)/2. The paper prints a plus, but its own figure of 64 % needs the minus."""


def _accounting(rows: list[dict[str, Any]]) -> str:
    body = [
        [
            row["form"] + ("" if row["window"] is None else f" to {row['window']}, residual"),
            f"{row['pairs']:,}", f"{row['pair_flops']:.2e}", f"{row['summed_flops']:.2e}",
            f"{row['tiles']}", f"{row['tile_flops']:.2e}", _size(row["stored"]), _size(row["peak"]), _size(row["adjoint"]),
        ]
        for row in rows
    ]  # fmt: skip
    head = ["gradient", "VJPs of pairs", "their FLOPs", "FLOPs, sum first", "tile VJPs", "their FLOPs", "stored states (§4.5)"]
    head += ["peak of the step", "adjoint state of a layer"]
    return f"""The paper's accounting beside plans of its model (diagonal, N = 4, P = 32, 4 layers, 4,096 steps). The first three columns and the
stored states are arithmetic; the tiles, their matrix-product FLOPs, the peak (parameters and all) and the adjoint state are planned.

{_table(head, body)}

A window costs memory where the full adjoint has none: it needs what A and the cotangents are made of for the T̄ − 1 steps after a
chunk, in every layer, where the full adjoint state is one state."""


def _figure_1(rows: list[dict[str, Any]], measured: list[dict[str, Any]], docs: Path) -> str:
    largest = [row for row in rows if row["size"] == "1.27B"]
    lines = [Line(f"{text} (arithmetic)", [(r["context"], r[way]) for r in largest], dashed=True) for way, text in WAYS.items()]
    lines.append(Line("adjcomp (planned)", [(r["context"], r["adjcomp"]) for r in largest]))
    x, y = Axis("context, tokens"), Axis("bytes of a training step")
    write_chart(docs / "figures" / "figure-1.svg", "Memory against context, 1.27B parameters", x, y, lines)
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for colour, size in enumerate(sizes):
        mine = [row for row in rows if row["size"] == size]
        lines.append(Line(f"{size}, adjcomp (planned)", [(r["context"], r["adjcomp"]) for r in mine], colour=colour))
        lines.append(Line(f"{size}, backprop (arithmetic)", [(r["context"], r["backprop"]) for r in mine], True, colour))
    write_chart(docs / "figures" / "figure-1-sizes.svg", "Memory against context, all sizes", x, y, lines)
    body = [
        [row["size"], f"{row['parameters']:,}", f"{row['context']:,}", *(_size(row[way]) for way in ("states", *WAYS, "adjcomp"))]
        for row in rows
    ]
    head = ["size", "parameters", "context", "model and Adam", *WAYS.values(), "adjcomp, smallest plan"]
    return f"""## Figure 1: memory against context

Mamba models of about the paper's sizes (the paper gives no dimensions), batch 2, Adam, one device, bfloat16 weights with float32
accumulators and Adam states. Backprop over fused kernels keeps about 37.5 KB a token and layer at width 2,048; layer checkpointing the
input of every layer and one layer's internals; the paper h, C, the step sizes and ŷ of every step and layer, and dl/dy_K. All three are
**arithmetic** and leave out the logits. adjcomp is the **planned** peak of the smallest plan, everything included; larger budgets buy
time.

![Memory against context at 1.27B parameters](figures/figure-1.svg)
![Memory against context at all sizes](figures/figure-1-sizes.svg)

{_table(head, body)}

The states that the paper stores are larger than what plain backprop over fused kernels keeps: a state has 16 numbers for every
channel, and it stores one for every step.

Measured here, in float32, batch 2, with 100 MB more than the smallest plan needs (that runs a few tokens at a time): the peak that the plan
predicts, the peak of what was live while it ran (with Adam's state added, which the run didn't make), and what plain autograd over the
same kernels keeps between forward and backward, beside the model and Adam.

{_measured(measured)}"""


def _measured(rows: list[dict[str, Any]]) -> str:
    body = [
        [r["size"], f"{r['context']:,}", f"{r['chunk']:,}", _size(r["planned"]), _size(r["measured"]), _size(r["plain"])]
        for r in rows
    ]
    return _table(["size", "context", "chunk", "peak, planned", "peak, measured", "plain autograd keeps, measured"], body)


def _claims(rows: list[dict[str, Any]], plans: list[dict[str, Any]]) -> str:
    one, nodes = rows
    least = "at least " if one["largest"] else ""
    body = [[r["where"], *(f"{r[way]:,}" for way in WAYS)] for r in rows]
    return f"""## The claims: 3× less memory, 35K to 100K tokens

Longest contexts of the 1.27B model, batch 2, Adam, on A100 GPUs of 40 GB, by **arithmetic**: one GPU, and the paper's five nodes of
eight with all their memory as one and no copy of anything.

{_table(["devices", *WAYS.values()], body)}

Under a plan one such GPU holds a step of {least}{one["adjcomp"]:,} tokens: the smallest **planned** peak of Figure 1 is {_size(one["peak"])}.
Plans that use all of the memory, with exact gradients, **planned**:

{_planned(plans)}

- *35K → 100K tokens on five nodes*: there is no experiment to compare with. Both ends of the claim fit on a single device under a plan;
  storing states as the paper does ends at {one["paper"]:,} tokens there, plain backprop over fused kernels at {one["backprop"]:,}. With the memory
  of all forty GPUs the stored states reach {nodes["paper"]:,} tokens, fewer than backprop's {nodes["backprop"]:,}.
- *Up to 3× less memory*: as the paper stores states, they take {_ratio()} times what fused backprop keeps, so there is no saving to
  find against it. The savings in the table of Figure 1 come from chunks, and have no fixed factor: they grow with the context."""


def _planned(plans: list[dict[str, Any]]) -> str:
    names = {"a100-40gb": "one GPU", "a100-40gb:5x8": "five nodes of eight"}
    body = [
        [names[p["machine"]], f"{p['context']:,}", f"{p['seconds']:,.1f}", f"{100 * p['gap']:.1f} %", _size(p["peak"])]
        for p in plans
    ]
    return _table(["devices", "context", "seconds of a step", "gap to the lower bound", "largest peak"], body)


def _ratio() -> str:
    stored = 2 * (4096 * 16 + 16 + 4096 + 2048)
    return f"{stored / 37_500:.1f}"


def _figure_6(rows: list[dict[str, Any]], docs: Path) -> str:
    names = {
        "full": "double sums", "truncated": "double sums, window 64", "backprop": "backprop",
        "adjcomp": "adjcomp, exact", "adjcomp, window": "adjcomp, window 64",
    }  # fmt: skip
    lines = [Line(f"{text} (measured)", [(r["context"], r[k]) for r in rows if r[k] is not None]) for k, text in names.items()]
    title = "Time of one gradient against context"
    write_chart(docs / "figures" / "figure-6.svg", title, Axis("context, tokens"), Axis("seconds"), lines)
    body = [[f"{r['context']:,}", *(_seconds(r[k]) for k in names)] for r in rows]
    return f"""## Figure 6: time against context

The paper's model (diagonal, N = 4, P = 32, 2 layers), one sequence; seconds of one gradient, **measured** on one thread. The double
sums are Algorithms 1 to 4 on one device, with the VJPs of all i ≤ t of one step t batched into matrix products.

![Time against context](figures/figure-6.svg)

{_table(["context", *names.values()], body)}

The double sums grow with the square of the context, the truncated ones linearly with a factor of T̄; taking the sum over t first makes
both forms linear. No number of devices changes that: the paper's 280 times (7 slices × 8 GPUs × 5 nodes) is assumed and not measured,
and slicing a GPU adds no FLOPs."""


def _coupling(found: dict[str, Any], docs: Path) -> str:
    rows = found["coupling"]
    deep = [row for row in rows if row["layers"] > 1]
    lines = [
        Line(f"{word} (measured)", [(r["layers"], r["error"]) for r in deep if r["trained"] is trained])
        for trained, word in ((False, "untrained"), (True, "trained"))
    ]
    title = "Residual coupling: error of the layers' gradients"
    write_chart(docs / "figures" / "residual-error.svg", title, Axis("layers"), Axis("relative error", log=False), lines)
    body = [
        [
            f"{r['layers']}",
            "trained" if r["trained"] else "untrained",
            *(f"{r[k]:.3f}" for k in ("error", "bottom", "top", "cosine")),
        ]
        for r in rows
    ]
    return f"""## Error of the residual form against depth

|g − g_exact| / |g_exact| over the layers' parameters, the paper's model (diagonal, N = 4, P = 32), 256 steps of text, **measured**;
"trained" is after 120 steps of Adam with exact gradients.

![Error of residual coupling](figures/residual-error.svg)

{_table(["layers", "model", "error", "bottom layer", "top layer", "cosine"], body)}

The top layer's gradient is exact, as nothing lies between it and the head; below it all paths through later layers' inputs are
missing. The embedding's gradient lacks them too."""


def _windows(found: dict[str, Any], docs: Path) -> str:
    lines, norms = [], []
    for depth in dict.fromkeys(row["layers"] for row in found["window"]):
        for trained, word in ((False, "untrained"), (True, "trained")):
            mine, norm = ([r for r in found[k] if (r["layers"], r["trained"]) == (depth, trained)] for k in ("window", "norms"))
            name = f"{depth} layer{'s' if depth > 1 else ''}, {word} (measured)"
            lines.append(Line(name, [(r["window"], r["exact"]) for r in mine]))
            norms.append(Line(name, [(r["distance"], r["norm"]) for r in norm]))
    x = Axis("window T̄, steps")
    write_chart(docs / "figures" / "window-error.svg", "Truncation: error of the gradient", x, Axis("relative error"), lines)
    title = "What is left of an adjoint state"
    write_chart(docs / "figures" / "adjoint-norms.svg", title, Axis("distance t − i, steps"), Axis("mean norm"), norms)
    left = {(n["layers"], n["trained"], n["distance"]): n["norm"] for n in found["norms"]}
    body = [
        [
            f"{r['window']}",
            f"{r['layers']}",
            "trained" if r["trained"] else "untrained",
            f"{r['exact']:.2e}",
            f"{r['residual']:.2e}",
            f"{left[r['layers'], r['trained'], r['window']]:.2e}",
        ]
        for r in found["window"]
    ]
    return f"""## Error of truncation against the window

The same models, **measured**; both errors against backpropagation, over all parameters. The last column is the mean norm of A[t] … A[t−T̄+1] over
layers and steps: how much of an adjoint state is left where the window ends.

![Error of truncation](figures/window-error.svg)
![Norms of adjoint states](figures/adjoint-norms.svg)

{_table(["window", "layers", "model", "error, exact coupling", "error, residual coupling", "norm at that distance"], body)}

With exact coupling the error falls as the adjoint states do. With residual coupling it stays at that of the coupling."""


def _training(rows: list[dict[str, Any]], docs: Path) -> str:
    lines = [Line(f"{row['form']} (measured)", list(_smooth(row["losses"]))) for row in rows]
    x, y = Axis("step", log=False), Axis("loss, nats a byte", log=False)
    write_chart(docs / "figures" / "training.svg", "Training on text", x, y, lines)
    steps = len(rows[0]["losses"])
    body = [[r["form"], f"{sum(r['losses'][-20:]) / 20:.3f}", f"{r['held_out']:.3f}"] for r in rows]
    return f"""## Training with each gradient

The paper's model (diagonal, N = 4, P = 32, 3 layers) on the sources of Python's standard library, byte by byte: {steps} steps of Adam at
equal learning rate from equal weights, 2 × 256 bytes a step, **measured**. Curves are means of ten steps.

![Loss curves](figures/training.svg)

{_table(["gradient", "loss, last 20 steps", "loss on other text"], body)}

A short run of a small model says that a form learns at all, not which is best at scale."""


def _smooth(losses: list[float]) -> list[tuple[float, float]]:
    return [(i + 10, sum(losses[i : i + 10]) / 10) for i in range(0, len(losses) - 9, 10)]


def _closing() -> str:
    return """## What the approximations need

- `coupling="residual"` needs layers that add to their input; a layer whose output is normalised has no such form and is refused.
- `adjoint_window=` needs linear recurrences (`adjcomp.ops`); a GRU or LSTM is refused. A cumulative sum counts as a recurrence with
  decay one. Convolutions are not cut. A window at least as long as the sequence is the full method and planned as such.
- A chunk shorter than the window reads the window's steps for each chunk, so its time is O(T · T̄ / chunk); chunks of at least the
  window, which the planner prefers where they fit, cost O(T).
- Under `coupling="residual"` the VJPs of a chunk's layers are independent: `Options(streams=4)` runs them side by side on one device's
  streams, as far as the budget has room for their workspaces; a plan on several devices by layers sends no cotangent but dl/dy_K.
- Gradients of a returned final state can't be cut to a window and are refused.
- Both are part of what a plan is: the printed plan says that its gradient is an approximation, a saved plan doesn't run where another
  gradient is asked for, `compile` warns once, and `adjcomp.check_gradients(model, inputs, adjoint_window=…, coupling=…)` measures the
  distance from backpropagation."""
