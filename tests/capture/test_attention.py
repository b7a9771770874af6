"""What is causal attention is captured as such; what isn't is refused by name, with its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fidelity
import pytest
import torch
from fidelity import Block, Residual, compare, tokens
from torch import Tensor, nn
from torch.nn import functional

import adjcomp

IDS = tokens(2, 19, vocab=31)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (B, H, T, D)


class Layer(nn.Module):
    """x plus what `attend` makes of one projection of it."""

    def __init__(self, attend: Attend, heads: int = 2) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        mixed = self.attend(*(part.transpose(1, 2) for part in parts))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def _model(attend: Attend) -> Residual:
    torch.manual_seed(0)
    return Residual([Block(8), Layer(attend), Block(8)], 8)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = [functional.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], None, 0.0, True) for h in range(q.shape[1])]
    return torch.stack(outs, 1)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every step's heads attend to each other: pointwise in time."""
    return torch.softmax(q.transpose(1, 2) @ k.transpose(1, 2).mT, -1).matmul(v.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("attend", [plain, *(pytest.param(f, marks=pytest.mark.slow) for f in (without_heads, scaled))])
def test_ways_to_call_it(attend: Attend) -> None:
    model = _model(attend)
    view = adjcomp.compile(model, chunk=7)
    compare(model, view, lambda m: m(IDS).pow(2).sum())
    assert any(tile.reads_past for tile in view.plan.costs.layers)


@pytest.mark.slow
def test_torchs_own_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return x + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    model = Residual([Own(), Own()], 8)
    compare(model, adjcomp.compile(model, chunk=7), lambda m: m(IDS).pow(2).sum())


def looks_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    steps = q.shape[2]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(steps, steps).tril().bool())


def drops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT - 1e9 * torch.ones(q.shape[2], q.shape[2]).triu(1)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (looks_both_ways, "is_causal=True"),
        (masks, "attn_mask"),
        (drops, r"drops 0\.1 of its weights"),
        (by_hand, "scaled_dot_product_attention"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(attend: Attend, reason: str) -> None:
    with pytest.raises(adjcomp.CaptureError, match=reason) as caught:
        adjcomp.compile(_model(attend))(IDS)
    assert "layers.1" in str(caught.value)


@pytest.mark.filterwarnings("ignore::adjcomp.ApproximationWarning")
def test_a_window_of_adjoints_has_nothing_to_cut_in_attention() -> None:
    model = _model(plain)
    view = adjcomp.compile(model, adjoint_window=4)
    with pytest.raises(adjcomp.CaptureError, match=r"layers\.1.*adjoint_window=4"):
        view(IDS)


def test_keys_are_no_state_that_a_call_hands_on() -> None:
    with pytest.raises(adjcomp.CaptureError, match=r"layers\.1.*keys and values aren't a state"):
        adjcomp.compile(_model(plain))(IDS, initial_state=None)


@pytest.mark.parametrize("placement", ["time", "grid"])
def test_devices_do_not_share_the_time_of_attention(placement: str) -> None:
    model, options = _model(plain), adjcomp.Options(placement=placement)
    with pytest.raises(ValueError, match=r"layers\.1 attends.*dimension 'layers'"):
        adjcomp.plan(model, "1GiB", seq_len=19, example_inputs=(IDS,), machine="h100-80gb:4", options=options)


def test_a_machine_of_many_devices_shares_the_layers() -> None:
    plan = adjcomp.plan(_model(plain), "1GiB", seq_len=19, example_inputs=(IDS,), machine="h100-80gb:2")
    plan.verify()
    assert "on 2 devices" in str(plan)


def bamba(**overrides: Any) -> nn.Module:
    """BambaForCausalLM: one layer of Mamba-2, one of grouped attention with rotated positions."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "attn_layer_indices": [1],
        "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "mamba_n_groups": 1, "use_cache": False,
    }  # fmt: skip
    return transformers.BambaForCausalLM(transformers.BambaConfig(**{**sizes, **overrides})).train()


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_hybrid_of_transformers(implementation: str) -> None:
    model, ids = bamba(attn_implementation=implementation), tokens(2, 21)
    compare(model, adjcomp.compile(model, chunk=6), fidelity.next_token(ids))


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_masks_of_padding(side: str) -> None:
    """Given padding on either side, and labels on it too, when queries see no key at all, then they get zeros as in torch."""
    model, ids = bamba(), tokens(3, 21)
    lengths = torch.tensor([[21], [9], [1]])
    steps = torch.arange(21)
    mask = (steps < lengths if side == "right" else steps >= 21 - lengths).long()
    compare(model, adjcomp.compile(model, chunk=4), fidelity.next_token(ids, attention_mask=mask))


@pytest.mark.parametrize(
    ("overrides", "inputs", "reason"),
    [
        ({"attention_dropout": 0.1}, {}, "drops 0.1"),
        ({}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}, "several documents"),
        ({}, {"attention_mask": torch.ones(1, 1, 8, 8)}, "4 dimensions"),
        ({"attn_implementation": "eager"}, {"attention_mask": torch.ones(1, 8, dtype=torch.long)}, "'sdpa'"),
    ],
)
def test_transformers_options_that_are_not_exact(overrides: dict[str, Any], inputs: dict[str, Tensor], reason: str) -> None:
    ids = tokens(1, 8)
    with pytest.raises(adjcomp.CaptureError, match=reason):
        adjcomp.compile(bamba(**overrides))(input_ids=ids, labels=ids, **inputs)


@pytest.mark.slow
def test_attention_over_heads_is_left_as_it_is() -> None:
    model = _model(over_heads)
    view = adjcomp.compile(model, chunk=7)
    compare(model, view, lambda m: m(IDS).pow(2).sum())
    assert not any(tile.reads_past for tile in view.plan.costs.layers)
