"""How far the approximations are from backpropagation, untrained and trained, and the adjoint states that explain it."""

from __future__ import annotations

from typing import Any

import torch
from example import PaperModel, text
from torch import Tensor

import adjcomp

STATES, WIDTH = 4, 32
DEPTHS = (1, 2, 4, 8)
WINDOWED = (1, 2, 4)  # layers of the models whose windows are varied
CONTEXT = 256
WINDOWS = (1, 4, 16, 64)
TRAINING_STEPS = 120
RATE = 3e-3
PLAIN = adjcomp.Options(deterministic=True, solver_time_limit_seconds=0.0)


def approximation_errors() -> dict[str, Any]:
    """Relative errors |g - g_exact| / |g_exact| over all parameters, and mean norms of products of decays by distance."""
    found: dict[str, Any] = {"coupling": [], "window": [], "norms": []}
    for depth in DEPTHS:
        for trained in (False, True):
            torch.manual_seed(0)
            model = PaperModel("diagonal", STATES, WIDTH, depth)
            if trained:
                train(model)
            ids, labels = batch(CONTEXT, offset=200_000)
            exact = gradient(model, ids, labels)
            row = {"layers": depth, "trained": trained}
            found["coupling"].append(row | error_of(exact, gradient(model, ids, labels, coupling="residual"), model))
            if depth in WINDOWED:
                for window in WINDOWS:
                    cut = gradient(model, ids, labels, adjoint_window=window)
                    both = gradient(model, ids, labels, adjoint_window=window, coupling="residual")
                    errors = {"exact": distance(exact, cut), "residual": distance(exact, both)}
                    found["window"].append({**row, "window": window, **errors})
                found["norms"] += [{**row, "distance": d, "norm": n} for d, n in decay_norms(model, ids)]
            print(found["coupling"][-1], flush=True)
    return found


def train(model: PaperModel) -> None:
    """Some steps of Adam with exact gradients."""
    torch.manual_seed(0)
    compiled = adjcomp.compile(model, chunk=CONTEXT, options=PLAIN)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(TRAINING_STEPS):
        optimizer.zero_grad()
        compiled(*batch(CONTEXT, offset=step * CONTEXT)).backward()
        optimizer.step()


_TEXT: list[Tensor] = []


def batch(context: int, offset: int, sequences: int = 1) -> tuple[Tensor, Tensor]:
    """Bytes of text and the bytes after them, (sequences, context) both."""
    if not _TEXT:
        _TEXT.append(text(1_500_000))
    rows = [_TEXT[0][offset + i * context : offset + (i + 1) * context + 1] for i in range(sequences)]
    data = torch.stack(rows)
    return data[:, :-1], data[:, 1:]


def gradient(model: PaperModel, ids: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    """By parameter."""
    compiled = adjcomp.compile(model, chunk=CONTEXT, options=PLAIN, **options)
    model.zero_grad(set_to_none=True)
    compiled(ids, labels).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def distance(exact: dict[str, Tensor], other: dict[str, Tensor], prefix: str = "") -> float:
    """Relative, over the parameters whose names start so."""
    names = [name for name in exact if name.startswith(prefix)]
    apart = sum(float((other[n] - exact[n]).double().norm() ** 2) for n in names)
    return (apart / sum(float(exact[n].double().norm() ** 2) for n in names)) ** 0.5


def error_of(exact: dict[str, Tensor], other: dict[str, Tensor], model: PaperModel) -> dict[str, float]:
    """Over all layers, and of the bottom and the top one; the cosine between the two gradients of the layers."""
    names = [name for name in exact if name.startswith("layers.")]
    a, b = (torch.cat([grads[n].flatten().double() for n in names]) for grads in (exact, other))
    top = f"layers.{len(model.layers) - 1}."
    return {
        "error": distance(exact, other, "layers."),
        "bottom": distance(exact, other, "layers.0."),
        "top": distance(exact, other, top),
        "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
    }


@torch.no_grad()
def decay_norms(model: PaperModel, ids: Tensor) -> list[tuple[int, float]]:
    """Mean over layers and steps of |A[t] … A[t-d+1]| / |1|: how much of an adjoint state is left after d steps."""
    found: dict[int, list[float]] = {}
    y = model.embed(ids)
    for layer in model.layers:
        logs = layer.decays(layer.norm(y))[0].double().log().cumsum(0)
        for d in (1, 2, 4, 8, 16, 32, 64, 128):
            products = (logs[d:] - logs[:-d]).exp()
            found.setdefault(d, []).append(float(products.norm(dim=1).mean()) / products.shape[1] ** 0.5)
        y = y + layer(y)
    return [(d, sum(norms) / len(norms)) for d, norms in found.items()]
