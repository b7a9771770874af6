"""How models reach self-attention over time, and the `adjcomp.ops.causal_attention` node that takes its place while tracing.

transformers asks `ALL_ATTENTION_FUNCTIONS` for an implementation, and builds a mask of (T, T) beforehand; here the mask is a note
of what it hides, and every implementation is the op. A model's own call of `F.scaled_dot_product_attention` with is_causal=True
is the op too. What attends over anything but time is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adjcomp import ops

Tensor = torch.Tensor
SCALED_DOT_PRODUCT = torch.nn.functional.scaled_dot_product_attention
FAR = {torch.float64: 1e30, torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}
_OTHER_SCORES = ("softcap", "s_aux", "position_bias", "sinks")  # options that change scores or their softmax


class Refused(Exception):
    """Attention that is not captured; the text says why. Whoever traces adds the place."""


@dataclass(frozen=True)
class CausalMask:
    """Stands for the mask that a transformers model builds.

    window: how many steps back a query looks, its own included; None for all. valid: (B, T), keys that are no padding; None
    where all are. seen: (B, T), queries that see any key.
    """

    window: int | None
    valid: Tensor | None = None
    seen: Tensor | None = None


def full_mask(*_args: Any, **options: Any) -> CausalMask:
    """`create_causal_mask` of transformers."""
    return _mask(None, options)


def sliding_mask(*args: Any, **options: Any) -> CausalMask:
    """`create_sliding_window_causal_mask` of transformers."""
    config = options["config"] if "config" in options else args[0]
    return _mask(int(config.sliding_window), options)


def _mask(window: int | None, options: dict[str, Any]) -> CausalMask:
    for name in ("or_mask_function", "and_mask_function", "block_sequence_ids"):
        if options.get(name) is not None:
            raise Refused(f"the model's causal mask is changed by {name}: attention is captured with plain causal masks only")
    given = options.get("attention_mask")
    if given is None:
        return CausalMask(window)
    if given.dim() != 2:
        raise Refused(f"attention_mask of {given.dim()} dimensions: masks of padding, (B, T), are supported in attention layers")
    if window is not None:
        raise Refused("attention_mask beside a sliding window: pad on the right, and leave the mask out")
    valid = given.to(torch.bool)
    return CausalMask(None, valid, valid.cumsum(1) > 0)


class Interface:
    """In the place of transformers' table of attention functions."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The op where attention is over time, else what the model would have called."""
        plain = self.original.get_interface(implementation, default)

        def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            if not isinstance(query.shape[2], torch.SymInt):
                return plain(module, query, key, value, mask, **options)
            if isinstance(mask, CausalMask) and mask.valid is not None and implementation != "sdpa":
                raise Refused(f"attention_mask with attn_implementation={implementation!r}: use 'sdpa'")
            return _attend(module, (query, key, value), mask, options), None

        return attend


def _attend(module: torch.nn.Module, heads_first: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]) -> Tensor:
    """(B, T, H, V) from queries, keys and values with heads before time."""
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Refused("attention that looks ahead (is_causal=False) needs the whole sequence and can't be cut into chunks")
    if not isinstance(mask, CausalMask | None):
        raise Refused("attention over time with a mask of the model's own: only causal masks and windows are captured")
    _check_options(options)
    dropout = float(options.get("dropout", 0.0))
    return _op(heads_first, dropout=dropout, scale=options.get("scaling"), mask=mask or CausalMask(None))


def _check_options(options: dict[str, Any]) -> None:
    for name in _OTHER_SCORES:
        if options.get(name) is not None:
            raise Refused(f"attention with {name}: scores other than scaled products are not supported")
    if options.get("output_attentions"):
        raise Refused("output_attentions=True asks for all attention weights, (T, T) for each head: they are never made here")
    for name in ("seq_idx", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q"):
        if options.get(name) is not None:
            raise Refused(f"attention was called with {name}: packed documents would see each other. Pass one document a row")


def _op(
    heads_first: tuple[Tensor, Tensor, Tensor], *, dropout: float, scale: float | None, mask: CausalMask = CausalMask(None)
) -> Tensor:
    if dropout > 0:
        raise Refused(
            f"attention drops {dropout:g} of its weights in training: set the attention dropout of the model to 0 (dropout on "
            "its output is fine)"
        )
    q, k, v = (t.transpose(1, 2) for t in heads_first)
    if mask.valid is None or mask.seen is None:
        return ops.causal_attention(q, k, v, scale=scale, window=mask.window)
    # One channel more carries the mask: it is 1 in queries, 0 in keys and far below all scores in those that are padding.
    hidden = torch.where(mask.valid, 0.0, -FAR[k.dtype]).to(k.dtype)[:, :, None, None]
    wide_q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
    wide_k = torch.cat([k, hidden.expand(-1, -1, k.shape[2], 1)], -1)
    y = ops.causal_attention(wide_q, wide_k, v, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return y * mask.seen[:, :, None, None].to(y.dtype)  # what sees no key is zero, as in torch


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, over (B, H, T, D) or (B, T, D)."""
    if attn_mask is not None:
        raise Refused("scaled_dot_product_attention with is_causal=True and attn_mask: leave the mask out")
    single = query.dim() == 3
    given = [t.unsqueeze(1) if single else t for t in (query, key, value)]
    y = _op((given[0], given[1], given[2]), dropout=dropout_p, scale=scale)
    return y.squeeze(2) if single else y.transpose(1, 2)


def attend_or_call(*args: Any, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`: the op where attention is causal and over time, else torch's."""
    if _is_causal_over_time(args, options):
        return scaled_dot_product(*args, **options)
    return SCALED_DOT_PRODUCT(*args, **options)


def _is_causal_over_time(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    query, key = (args[i] if i < len(args) else options[name] for i, name in enumerate(("query", "key")))
    causal = args[5] if len(args) > 5 else options.get("is_causal", False)
    return bool(causal) and query.dim() in (3, 4) and isinstance(query.shape[-2], torch.SymInt) and key.dim() == query.dim()
