"""Run an FX graph node by node under autograd, keeping the model's own no_grad regions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class GradInterpreter(fx.Interpreter):
    """Nodes that the model made under `no_grad` (recorded at capture) stay outside of the gradient."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.meta.get("no_grad"):
            with torch.no_grad():
                return super().run_node(n)
        return super().run_node(n)
