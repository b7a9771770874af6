"""Models and ways to run them, for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from transformers import MambaConfig, MambaForCausalLM

import adjcomp
from adjcomp.passes.lowering import kernels_as_ops

VOCABULARY = 1000
TIGHT_CHUNK = 1024  # tokens; shorter chunks need less memory still, and pay for it in kernel launches
Run = Callable[[], torch.Tensor]


class Budget(StrEnum):
    """TIGHT: the smallest that recomputes no tile more than once."""

    TIGHT = "tight"
    UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Workload:
    """One model, one context, one budget. Where a context has one budget, its name leaves it out."""

    width: int
    layers: int
    tokens: int
    budget: Budget
    one_budget: bool = False

    @property
    def name(self) -> str:
        """As in the tables: mamba-d256-l4-t8192-tight."""
        shape = f"mamba-d{self.width}-l{self.layers}-t{self.tokens}"
        return shape if self.one_budget else f"{shape}-{self.budget}"

    def model(self) -> MambaForCausalLM:
        """A random transformers Mamba in train mode, float32."""
        torch.manual_seed(0)
        config = MambaConfig(
            vocab_size=VOCABULARY, hidden_size=self.width, num_hidden_layers=self.layers, state_size=16, use_cache=False
        )
        return MambaForCausalLM(config).train()

    def tokens_in(self) -> torch.Tensor:
        """(1, T) token ids."""
        return torch.randint(0, VOCABULARY, (1, self.tokens), generator=torch.Generator().manual_seed(1))


def plain_same_ops(model: MambaForCausalLM, ids: torch.Tensor) -> Run:
    """Plain autograd of the same model over the same fused ops: what a user has whose library has fast kernels."""

    def run() -> torch.Tensor:
        with kernels_as_ops():
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    return run


def plain(model: MambaForCausalLM, ids: torch.Tensor) -> Run:
    """The model as the library runs it on this machine."""
    return lambda: model(input_ids=ids, labels=ids).loss


def with_mambapy(model: MambaForCausalLM, ids: torch.Tensor) -> Run:
    """The library with its parallel scan in torch switched on (needs the package mambapy)."""
    for layer in model.backbone.layers:
        layer.mixer.use_mambapy = True
    return plain(model, ids)


def compiled(model: MambaForCausalLM, ids: torch.Tensor, budget: Budget) -> torch.nn.Module:
    """adjcomp by the plan of a workload's budget."""
    if budget is Budget.UNLIMITED:
        return adjcomp.compile(model)
    return adjcomp.compile(model, plan=tight_plan(model, ids))


def tight_plan(model: MambaForCausalLM, ids: torch.Tensor) -> adjcomp.Plan:
    """The plan of the smallest budget, to 2 %, with chunks of 1,024 tokens that runs no tile more than twice in all."""
    shape = {"batch_size": 1, "seq_len": ids.shape[1], "machine": "cpu", "chunk": TIGHT_CHUNK}
    try:
        adjcomp.plan(model, 1, **shape)
    except adjcomp.BudgetError as error:
        low = error.minimum_bytes
    high = low * 64
    while high > low * 1.02:
        middle = int((low * high) ** 0.5)
        low, high = (low, middle) if _recomputes_once(adjcomp.plan(model, middle, **shape)) else (middle, high)
    return adjcomp.plan(model, high, **shape)


def _recomputes_once(plan: adjcomp.Plan) -> bool:
    from adjcomp.ir.actions import Advance, Recompute

    seen: set[tuple[int, int]] = set()
    for action in plan.actions:
        if isinstance(action, Advance):
            return False
        if isinstance(action, Recompute):
            if (action.layer, action.chunk) in seen:
                return False
            seen.add((action.layer, action.chunk))
    return True
