"""Models of the cases, and the comparison of a compiled model's loss and gradients with plain autograd's.

The bound of a parameter's gradient is |g - g_plain| <= bound · |g_plain| + 1e-3 · bound · |all g_plain|, with bound 1e-5 in
float32
and 1e-10 for models in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import adjcomp

Call = Callable[[nn.Module], Tensor]  # from a model, plain or compiled, to a scalar loss

_SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "conv_kernel": 4, "expand": 2, "use_cache": False}


def mamba(**overrides: Any) -> nn.Module:
    """MambaForCausalLM, 4 layers of width 32, tied embeddings."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(_SMALL, state_size=8, time_step_rank=4, tie_word_embeddings=True)
    return transformers.MambaForCausalLM(transformers.MambaConfig(**{**sizes, **overrides})).train()


def mamba2(**overrides: Any) -> nn.Module:
    """Mamba2ForCausalLM, 4 layers of width 32, 4 heads of 16, untied embeddings."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(_SMALL, state_size=16, head_dim=16, num_heads=4, n_groups=1, chunk_size=16, tie_word_embeddings=False)
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**sizes, **overrides})).train()


def falcon_mamba(**overrides: Any) -> nn.Module:
    """FalconMambaForCausalLM, 4 layers of width 32."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(_SMALL, state_size=8, time_step_rank=4)
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**{**sizes, **overrides})).train()


FAMILIES: dict[str, Callable[..., nn.Module]] = {"mamba": mamba, "mamba2": mamba2, "falcon_mamba": falcon_mamba}


def tokens(batch: int, length: int, seed: int = 1, vocab: int = 61) -> Tensor:
    """Token ids (batch, length), int64."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def next_token(ids: Tensor, **inputs: Any) -> Call:
    """The model's own loss on `ids`."""
    return lambda model: model(input_ids=ids, labels=ids, **inputs).loss


@dataclass(frozen=True)
class Gradients:
    """A loss and the gradient of every parameter, None where autograd leaves None."""

    loss: Tensor
    grads: dict[str, Tensor | None]

    def none(self) -> set[str]:
        return {name for name, grad in self.grads.items() if grad is None}


def measure(model: nn.Module, run: Callable[[], Tensor]) -> Gradients:
    """Loss and gradients of `run()` for the parameters of `model`, whose own gradients are dropped before and after."""
    model.zero_grad(set_to_none=True)
    loss = run()
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Gradients(loss.detach().clone(), grads)


def distance(got: Gradients, want: Gradients) -> float:
    """Largest over parameters of |g - g_want| / (|g_want| + 1e-3 |all g_want|); infinite where None sets differ or values
    aren't finite.
    """
    known = [g for g in want.grads.values() if g is not None]
    scale = 1e-3 * sum(float(g.abs().double().pow(2).sum()) for g in known) ** 0.5
    worst = 0.0
    for name, expected in want.grads.items():
        grad = got.grads[name]
        if grad is None or expected is None:
            worst = max(worst, 0.0 if grad is expected else float("inf"))
        elif not bool(grad.isfinite().all()):
            return float("inf")
        else:
            assert grad.dtype is expected.dtype, name
            worst = max(worst, float((grad - expected).norm()) / ((float(expected.norm()) + scale) or 1.0))
    return worst


def compare(model: nn.Module, compiled: nn.Module, call: Call, bound: float = 1e-5) -> Gradients:
    """Assert that a compiled model gives plain's loss and gradients; returns plain's."""
    plain = measure(model, lambda: call(model))
    got = measure(model, lambda: call(compiled))
    assert distance(got, plain) <= bound
    assert float((got.loss - plain.loss).abs()) <= 0.1 * bound * float(plain.loss.abs()) + 1e-30
    return plain


def tightest(model: nn.Module, call: Call, chunk: int | None = None) -> int:
    """The smallest budget in bytes under which `call` can be planned."""
    try:
        call(adjcomp.compile(model, mem_budget="1KiB", chunk=chunk))
    except adjcomp.BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of 1 KiB was enough")


class Residual(nn.Module):
    """Token ids or float sequences through `blocks` to vocabulary logits or `width` channels; every block returns the new
    stream.
    """

    def __init__(self, blocks: Iterable[nn.Module], width: int, vocab: int | None = 31, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width) if vocab is None else nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab or width, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class DiagonalMixer(nn.Module):
    """A diagonal state space layer with `states` states a channel: h[t] = a h[t-1] + b x[t], y = Σ c h."""

    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(width, states))
        self.inputs, self.outputs = nn.Parameter(torch.randn(width, states)), nn.Parameter(torch.randn(width, states))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        driven = x.unsqueeze(-1) * self.inputs
        h, _ = adjcomp.ops.linear_scan(torch.sigmoid(self.decay).expand_as(driven), driven)
        return self.project((h * self.outputs).sum(-1))


class Block(nn.Module):
    """Norm, diagonal mixer, dropout, residual."""

    def __init__(self, width: int, states: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mixer, self.dropout = nn.LayerNorm(width), DiagonalMixer(width, states), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mixer(self.norm(x)))


def diagonal_stack(layers: int = 3, width: int = 8, vocab: int | None = 31, states: int = 4, dropout: float = 0.0) -> Residual:
    """A residual stack of diagonal state space blocks, float32, seeded."""
    torch.manual_seed(0)
    return Residual([Block(width, states, dropout) for _ in range(layers)], width, vocab)
