"""Training on text with exact, residual and truncated gradients, at equal steps from equal weights."""

from __future__ import annotations

from typing import Any

import torch
from errors import PLAIN, RATE, STATES, WIDTH, batch
from example import PaperModel

import adjcomp

STEPS, CONTEXT, LAYERS = 150, 256, 3
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "residual": {"coupling": "residual"},
    "window 16": {"adjoint_window": 16},
    "window 1": {"adjoint_window": 1},
    "residual, window 16": {"coupling": "residual", "adjoint_window": 16},
}


def loss_curves() -> list[dict[str, Any]]:
    """One row a form: losses of every step on text, and the mean loss on text that was not trained on."""
    rows = []
    for name, options in FORMS.items():
        torch.manual_seed(0)
        model = PaperModel("diagonal", STATES, WIDTH, LAYERS)
        compiled = adjcomp.compile(model, options=PLAIN, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = compiled(*batch(CONTEXT, offset=2 * step * CONTEXT, sequences=2))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            held_out = [float(model(*batch(CONTEXT, offset=1_200_000 + i * CONTEXT))) for i in range(40)]
        rows.append({"form": name, "losses": losses, "held_out": sum(held_out) / len(held_out)})
        print(name, losses[-1], rows[-1]["held_out"], flush=True)
    return rows
