"""Each function that stands for a kernel of transformers computes what transformers' own form of that kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaConfig, RecurrentGemmaRecurrentBlock
from transformers.models.rwkv import modeling_rwkv as rwkv
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend, xLSTMConfig

from adjcomp import CaptureError
from adjcomp.passes.lowering_delta import gated_delta_rule
from adjcomp.passes.lowering_layers import layers_as_ops
from adjcomp.passes.lowering_rwkv import rwkv_linear_attention


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], tensors: dict[str, Tensor], **options: Any) -> None:
    """Outputs and gradients of both, each within 1e-5 of its norm."""
    results = []
    for function in (ours, theirs):
        given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        outputs = [out for out in function(**given, **options) if out is not None]
        torch.manual_seed(1)
        seeds = [torch.randn(out.shape) for out in outputs]
        grads = torch.autograd.grad([(out * seed).sum() for out, seed in zip(outputs, seeds, strict=True)], [*given.values()])
        results.append([*outputs, *grads])
    for mine, expected in zip(*results, strict=True):
        assert mine.dtype is expected.dtype
        assert float((mine - expected).detach().norm()) <= 1e-5 * float(expected.detach().norm())


def delta_tensors(keys: int, per_channel: bool, state: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    batch, steps, heads, width, values = 2, 21, 4, 6, 5
    decay = (batch, steps, heads, width) if per_channel else (batch, steps, heads)
    tensors = {
        "query": torch.randn(batch, steps, keys, width),
        "key": torch.randn(batch, steps, keys, width),
        "value": torch.randn(batch, steps, heads, values),
        "g": 3 * logsigmoid(torch.randn(decay)),
        "beta": torch.rand(batch, steps, heads),
    }
    return {**tensors, "initial_state": torch.randn(batch, heads, width, values)} if state else tensors


@pytest.mark.parametrize("state", [False, True])
def test_the_gated_delta_rule_with_grouped_heads(state: bool) -> None:
    """Two key heads serve four value heads; queries and keys are normalised; the state goes in and out."""
    tensors = delta_tensors(2, False, state)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": state}
    agree(gated_delta_rule, qwen.torch_chunk_gated_delta_rule, tensors, chunk_size=8, **options)


@pytest.mark.parametrize("state", [False, True])
def test_kimi_delta_attention(state: bool) -> None:
    """A decay for each key channel."""
    tensors = delta_tensors(4, True, state)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": state}
    agree(gated_delta_rule, kimi.chunk_kimi_delta_attention, tensors, chunk_size=8, **options)


@pytest.mark.parametrize("option", ["cu_seqlens", "use_gate_in_kernel"])
def test_what_a_kernel_would_do_beside_is_refused(option: str) -> None:
    """Borders between documents, or a gate made inside of the kernel, are never dropped without a word."""
    with pytest.raises(CaptureError, match=option):
        gated_delta_rule(**delta_tensors(4, False, False), **{option: torch.ones(3)})


def rwkv_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    key = (64 * torch.randn(2, 21, 5)).round() / 64  # exact beside numbers of some hundreds, too
    return {"time_decay": torch.randn(5), "time_first": torch.randn(5), "key": key, "value": torch.randn(2, 21, 5)}


@pytest.mark.parametrize("returned", [False, True])
def test_weighted_means_of_rwkv(returned: bool) -> None:
    """States that are returned have gradients of their own."""

    def flat(function: Callable[..., Any]) -> Callable[..., list[Tensor]]:
        def run(**given: Tensor) -> list[Tensor]:
            out, states = function(**given, return_state=returned)
            return [out, *(states or [])]

        return run

    agree(flat(rwkv_linear_attention), flat(rwkv.rwkv_linear_attention_cpu), rwkv_tensors())


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_weighted_means_of_rwkv_depend_on_differences_of_keys_alone(offset: float) -> None:
    """Given keys whose exponentials float32 can't hold, then the means are those of smaller ones."""
    given = rwkv_tensors()
    wanted, _ = rwkv_linear_attention(**given)
    found, _ = rwkv_linear_attention(**{**given, "key": given["key"] + offset})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rwkv_that_goes_on_from_a_state_is_refused() -> None:
    with pytest.raises(CaptureError, match="state"):
        rwkv_linear_attention(**rwkv_tensors(), state=[torch.zeros(2, 5)] * 3)


def test_lightning_attention() -> None:
    """Blocks of another length than the op's, a last block cut short, padding at the start of a row."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "head_dim": 4, "block_size": 8, "num_hidden_layers": 2}
    layer = MiniMaxLightningAttention(MiniMaxConfig(**sizes, layer_types=["linear_attention"] * 2), 0)
    mask = torch.ones(2, 21).index_fill(1, torch.tensor([0, 1]), 0)

    def run(hidden_states: Tensor) -> tuple[Tensor, ...]:
        return layer(hidden_states, (), mask)

    def replaced(hidden_states: Tensor) -> tuple[Tensor, ...]:
        with layers_as_ops():
            return layer(hidden_states, (), mask)

    agree(replaced, run, {"hidden_states": torch.randn(2, 21, 12)})


@pytest.mark.parametrize("gates", [-10.0, 0.0, 4.0])
def test_matrix_memory(gates: float) -> None:
    """Where the maximum is the initial one, both, and the input gate's; ε and the floor of the denominator count in all three."""
    torch.manual_seed(0)
    backend = xLSTMBackend(xLSTMConfig(hidden_size=12, num_heads=2, chunk_size=8, eps=1e-2))
    shape = (2, 2, 21)
    tensors = {name: torch.rand(*shape, 5) for name in ("query", "key", "value")}  # positive: no denominator near zero
    tensors |= {"igate": torch.randn(shape) + gates, "fgate": torch.randn(shape) + 2}

    def run(**given: Tensor) -> tuple[Tensor, ...]:
        h, states = backend(**given)
        return (h, *states)

    def replaced(**given: Tensor) -> tuple[Tensor, ...]:
        with layers_as_ops():
            return run(**given)

    agree(replaced, run, tensors)


def test_griffin_s_recurrent_block() -> None:
    """A document starts inside of a row; some decays are so slow that the derivative of the square root is at its bound."""
    torch.manual_seed(0)
    block = RecurrentGemmaRecurrentBlock(RecurrentGemmaConfig(hidden_size=12, lru_width=8, num_attention_heads=2), 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        block.rg_lru.recurrent_param.copy_(torch.tensor([-40.0, -16.0, -14.0, -13.0, -5.0, 0.0, 1.0, 2.0]))
    positions = torch.tensor([[*range(9), *range(12)]])

    def run(hidden_states: Tensor) -> tuple[Tensor, ...]:
        out = block(hidden_states, positions, None, use_cache=False)[0]
        return (out, *torch.autograd.grad(out.square().sum(), [hidden_states, *block.parameters()]))

    x = torch.randn(2, 21, 12, requires_grad=True)
    plain = run(x)
    with layers_as_ops():
        ours = run(x)
        with pytest.raises(CaptureError, match="use_cache"):
            block(x, positions, None, use_cache=True)
    for mine, expected in zip(ours, plain, strict=True):
        assert float((mine - expected).detach().norm()) <= 1e-5 * float(expected.detach().norm())
