"""Calls without gradients: which of them run chunk by chunk, and losses by token of documents of any length."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from adjcomp.keys import EVALUATION, is_plain
from adjcomp.running import run_call
from adjcomp.session import Session

CHUNKED_FROM = 4096  # tokens of a row from which a call without labels runs chunk by chunk, too


def evaluation_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keywords with which a call without gradients runs chunk by chunk; None where the model's own forward serves.

    A loss is computed by chunks whatever the length is, so that logits are None for short and long sequences alike. Other calls
    are worth it from some length on. What takes or makes an inference cache belongs to the model.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if kwargs.get("use_cache") or not all(isinstance(leaf, torch.Tensor) or is_plain(leaf) for leaf in leaves):
        return None
    bound = signature.bind_partial(None, *args, **kwargs).arguments
    longest = max((leaf.shape[1] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2), default=0)
    if bound.get("labels") is None and longest < CHUNKED_FROM:
        return None
    return {**kwargs, "use_cache": False} if "use_cache" in signature.parameters else dict(kwargs)


class TokenLosses(torch.nn.Module):
    """A language model and the loss of every token: (input_ids, targets) -> (B, T) float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
        output = self.model(input_ids, **inputs)
        logits = output if isinstance(output, torch.Tensor) else output["logits"] if isinstance(output, Mapping) else output[0]
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


def prefill_options(session: Session) -> dict[str, Any]:
    """Keywords that keep a call from making a cache of its own, and from more logits than the last step's."""
    options = {"use_cache": False, "logits_to_keep": 1}
    names = inspect.signature(session.model.forward).parameters
    return {name: value for name, value in options.items() if name in names}


def token_losses(session: Session, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Losses of the tokens after the first, (B, T - 1) float32."""
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise ValueError(f"nll takes token ids (B, T) with T at least 2, not {tuple(input_ids.shape)}")
    session.check_whole()
    targets = functional.pad(input_ids[:, 1:], (0, 1))  # the last target is nobody's
    options = {name: value for name, value in prefill_options(session).items() if name == "use_cache"}
    with torch.no_grad():
        losses: torch.Tensor = run_call(session.scoring(TokenLosses), (input_ids, targets), {**options, **inputs}, EVALUATION)
    return losses[:, :-1]
