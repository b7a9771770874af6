"""Families of transformers beside Mamba's own, as they are: loss and gradients at any chunk length."""

from __future__ import annotations

import pytest
import torch
from fidelity import Block, Residual, compare, next_token, tokens
from library_models import FAMILIES
from torch import Tensor, nn

import adjcomp


def batch(length: int) -> Tensor:
    return tokens(2, length, vocab=60) + 3  # no padding id among them


SOON = ("kimi_linear", "lfm2", "qwen3_next", "xlstm", "zamba")


@pytest.mark.parametrize("family", [f if f in SOON else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_a_family_trains(family: str) -> None:
    model = FAMILIES[family].make(**FAMILIES[family].alone)
    compare(model, adjcomp.compile(model, chunk=7), next_token(batch(16)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_at_any_chunk_length(family: str, chunk: int | None) -> None:
    """With padding at the start of a row, and labels that count for nothing."""
    model = FAMILIES[family].make(**FAMILIES[family].alone)
    ids = batch(41)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    compare(model, adjcomp.compile(model, chunk=chunk), lambda m: m(input_ids=ids, attention_mask=mask, labels=labels).loss)


def test_hidden_states_that_transformers_collects_by_hooks() -> None:
    """The hooks come at the first call that asks, in plain and compiled models alike, and only once; they stay harmless."""
    ids = batch(9)

    def call(model: nn.Module) -> Tensor:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert len(states) == 3
        return states[1].square().mean()

    model = FAMILIES["lfm2"].make(**FAMILIES["lfm2"].alone)
    compare(model, adjcomp.compile(model, chunk=4), call)


def test_a_bias_that_autocast_narrows_is_not_written_to() -> None:
    """Its narrow copy is made for one product alone, but is broadcast over the rows of it."""
    torch.manual_seed(0)
    model = Residual([Block(8), Block(8)], 8, None)
    x = torch.randn(2, 9, 8)

    def call(run: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).float().square().mean()

    compare(model, adjcomp.compile(model, chunk=4), call, bound=5e-2)
