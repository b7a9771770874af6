"""Figure 6: seconds of one gradient against the context, for backpropagation, the paper's double sums and adjcomp.

Seconds are those of the processor on one thread, the least of some runs, so that what else the machine does counts for little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from example import PaperModel, SelectiveLayer, text
from torch import Tensor

import adjcomp

STATES, WIDTH, LAYERS = 4, 32, 2
WINDOW = 64
CONTEXTS = (16, 64, 256, 1_024, 4_096, 16_384)
MOST_SUMMED = 4_096  # the double sums stop here: their time grows with the square
SECONDS = 0.5  # of repetitions of one point


def figure_6() -> list[dict[str, Any]]:
    """One row a context; None where a way would take too long."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PaperModel("diagonal", STATES, WIDTH, LAYERS)
    data = text(CONTEXTS[-1] + 1)
    rows = []
    for context in CONTEXTS:
        ids, labels = data[None, :context], data[None, 1 : context + 1]
        ways: dict[str, Callable[[], object] | None] = {
            "backprop": lambda ids=ids, labels=labels: model(ids, labels).backward(),
            "full": None,
            "truncated": None,
        }
        if context <= MOST_SUMMED:
            ways["full"] = lambda ids=ids, labels=labels: double_sums(model, ids, labels, None)
            ways["truncated"] = lambda ids=ids, labels=labels: double_sums(model, ids, labels, WINDOW)
        for name, options in (("adjcomp", {}), ("adjcomp, window", {"adjoint_window": WINDOW})):
            compiled = adjcomp.compile(model, options=adjcomp.Options(deterministic=True), **options)
            ways[name] = lambda run=compiled, ids=ids, labels=labels: run(ids, labels).backward()
        rows.append({"context": context} | {name: None if way is None else least_seconds(way) for name, way in ways.items()})
        model.zero_grad(set_to_none=True)
        print(rows[-1], flush=True)
    return rows


def least_seconds(run: Callable[[], object]) -> float:
    """After one run that plans and warms up."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < 20):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
        if sum(times) > 4 * SECONDS:
            break
    return min(times)


def double_sums(model: PaperModel, ids: Tensor, labels: Tensor, window: int | None) -> list[dict[str, Tensor]]:
    """Algorithms 1 to 4 on one device: states and dl/dy_K of a forward, then for each layer and step t the VJPs of all i ≤ t.

    All pairs (t, i) of one t are one batched VJP, which is kinder than one at a time.
    """
    with torch.no_grad():
        inputs, y = [], model.embed(ids)
        for layer in model.layers:
            inputs.append(layer.norm(y)[0])
            y = y + layer(y)
    top = y.detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model.head(model.norm(top)).flatten(0, 1), labels.flatten())
    v = torch.autograd.grad(loss, top)[0][0]
    with torch.no_grad():
        return [layer_sums(layer, x, v, window) for layer, x in zip(model.layers, inputs, strict=True)]


def layer_sums(layer: SelectiveLayer, x: Tensor, v: Tensor, window: int | None) -> dict[str, Tensor]:
    """The sums of Proposition 2 for 𝒜, ℬ and 𝒞 of a diagonal layer; x, v: (T, P)."""
    a, B, C = layer.decays(x), layer.B(x), layer.C(x) / layer.states
    h, _ = adjcomp.ops.linear_scan(a[None, :, :, None].expand(1, -1, -1, x.shape[1]), (B[:, :, None] * x[:, None])[None])
    before = torch.cat([torch.zeros_like(h[0, :1]), h[0, :-1]])
    slope = a * (1 - a)
    grads = {name: torch.zeros_like(network.weight) for name, network in (("A", layer.A), ("B", layer.B), ("C", layer.C))}
    for t in range(len(x)):
        first = 0 if window is None else max(0, t + 1 - window)
        span = slice(first, t + 1)
        decays = torch.cat([a[first + 1 : t + 1], torch.ones_like(a[:1])]).flip(0).cumprod(0).flip(0)
        adjoint = C[t] * decays  # λ[t,i], (steps, N)
        into_A = adjoint * (before[span] @ v[t]) * slope[span]
        into_B = adjoint * (x[span] @ v[t])[:, None]
        grads["A"] += into_A.T @ x[span]
        grads["B"] += into_B.T @ x[span]
        grads["C"] += torch.outer(h[0, t] @ v[t], x[t]) / layer.states
    return grads
