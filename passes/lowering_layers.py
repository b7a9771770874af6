"""Layers of transformers that walk over time in Python inside of their own forward, with no kernel to put an op in the place of:
MiniMax's lightning attention and xLSTM's matrix memory. While tracing, their classes compute the same by `adjcomp.ops`; so do
mixtures of experts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adjcomp import ops
from adjcomp.passes.lowering_experts import experts_interface
from adjcomp.passes.lowering_griffin import recurrent_block

Forward = Callable[..., Any]


def _lightning_attention(
    original: Forward,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: Tensor | None = None,
    cache: object = None,
    **rest: Any,
) -> Any:
    """Linear attention with one constant decay a head: SSD with steps of one, values as inputs, keys and queries as B and C."""
    if cache is not None:
        return original(layer, hidden_states, position_embeddings, attention_mask, cache=cache, **rest)
    batch, steps, _ = hidden_states.shape
    heads, width = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    q, k, v = qkv.reshape(batch, steps, heads, 3 * width).split(width, dim=3)
    ones = torch.ones_like(v[..., 0], dtype=torch.float32)
    y, last = ops.ssd(v, ones, -layer.slope_rate.reshape(-1), k, q)
    y = layer.norm(y.reshape(batch, steps, heads * width))
    return layer.out_proj(functional.sigmoid(layer.output_gate(hidden_states)) * y), last.transpose(2, 3)


def _matrix_memory(
    original: Forward,
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Any:
    """mLSTM. query, key: (B, H, T, K). value: (B, H, T, V). igate, fgate: (B, H, T), before their exponential and sigmoid.

    The running maximum m[t] = max(log f[t] + m[t-1], i[t]) scales memory and normaliser by e^{-m}: then both forget by
    e^{log f[t] + m[t-1] - m[t]} and take up e^{i[t] - m[t]}, neither above one. m itself is in the result, as
    y = C q / (max(|n q|, e^{-m}) + ε), so it has a gradient. The normaliser is a value channel of ones.
    """
    config, states = backend.config, {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    mode = mode or config.mode
    wanted = "inference" in mode or (config.return_last_states if return_last_states is None else return_last_states)
    if any(state is not None for state in states.values()) or (wanted and config.mode == "train_with_padding"):
        return original(backend, query, key, value, igate, fgate, **states, return_last_states=return_last_states, mode=mode)
    q, k, v = (t.transpose(1, 2).float() for t in (query, key, value))
    log_forget, enter = functional.logsigmoid(fgate.transpose(1, 2).float()), igate.transpose(1, 2).float()
    m, m_last = ops.max_plus_scan(log_forget, enter)
    before = functional.pad(m, (0, 0, 1, -1))
    taken = torch.cat([v, torch.ones_like(v[..., :1])], -1) * torch.exp(enter - m)[..., None]
    # before - m first: it is exact where log f + m[t-1] was rounded to m, so the decay keeps what the rounding took.
    y, last = ops.linear_attention(q * query.shape[-1] ** -0.5, k, taken, (before - m) + log_forget)
    normaliser = torch.maximum(y[..., -1].abs(), torch.exp(-m)) + config.eps
    h = (y[..., :-1] / normaliser[..., None]).to(query.dtype).transpose(1, 2)
    return (h, (last[..., :-1], last[..., -1], m_last[..., None])) if wanted else h


# By module below transformers.models and class: what takes the place of its forward, given the original one.
LAYERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("recurrent_gemma.modeling_recurrent_gemma", "RecurrentGemmaRecurrentBlock"): recurrent_block,
    ("minimax.modeling_minimax", "MiniMaxLightningAttention"): _lightning_attention,
    ("xlstm.modeling_xlstm", "xLSTMBackend"): _matrix_memory,
}


@contextlib.contextmanager
def layers_as_ops() -> Iterator[None]:
    """Put the forwards of this file into the classes of loaded transformers modules; restore them at the end."""
    replaced: list[tuple[type[nn.Module], Forward]] = []
    table = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    chosen = None if table is None else table.get_interface
    try:
        for (name, layer), substitute in LAYERS.items():
            module = sys.modules.get(f"transformers.models.{name}")
            found = None if module is None else vars(module).get(layer)
            if found is not None:
                replaced.append((found, found.forward))
                found.forward = _bound(substitute, found.forward)
        if table is not None:
            table.get_interface = experts_interface
        yield
    finally:
        if table is not None:
            table.get_interface = chosen
        for found, original in replaced:
            found.forward = original  # type: ignore[method-assign]


def _bound(substitute: Callable[..., Any], original: Forward) -> Forward:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return substitute(original, layer, *args, **kwargs)

    return forward


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turn off the default by which models of transformers fill an inference cache, which a step can't go on from or return."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    filling = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in filling:
            config.use_cache = False
        yield
    finally:
        for config in filling:
            config.use_cache = True
