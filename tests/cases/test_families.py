"""Families of transformers beside Mamba's own, as they are: loss and gradients at any chunk length."""

from __future__ import annotations

import re

import pytest
import torch
from fidelity import Block, Residual, compare, next_token, tokens
from library_models import FAMILIES
from repository import ROOT
from torch import Tensor, nn

import adjcomp


def batch(length: int) -> Tensor:
    return tokens(2, length, vocab=60) + 3  # no padding id among them


SOON = ("kimi_linear", "xlstm")


@pytest.mark.parametrize("family", [f if f in SOON else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_a_family_trains(family: str) -> None:
    model = FAMILIES[family].make()
    compare(model, adjcomp.compile(model, chunk=7), next_token(batch(16)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_at_any_chunk_length(family: str, chunk: int | None) -> None:
    """A row is padded at its end, where labels count for nothing."""
    model, ids = FAMILIES[family].make(), batch(41)
    labels = ids.index_fill(1, torch.arange(36, 41), -100)
    compare(model, adjcomp.compile(model, chunk=chunk), lambda m: m(input_ids=ids, labels=labels).loss)


@pytest.mark.slow
def test_the_loss_that_balances_routers() -> None:
    """Its shares of experts and mean probabilities are sums over the whole sequence."""
    model, ids = FAMILIES["minimax"].make(), batch(16)
    compare(model, adjcomp.compile(model, chunk=7), lambda m: m(input_ids=ids, labels=ids, output_router_logits=True).loss)


def test_hidden_states_that_transformers_collects_by_hooks() -> None:
    """The hooks come at the first call that asks, in plain and compiled models alike, and only once; they stay harmless."""
    ids = batch(9)

    def call(model: nn.Module) -> Tensor:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert len(states) == 3
        return states[1].square().mean()

    model = FAMILIES["lfm2"].make()
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


class Precise(Block):
    """Computes in float32 also where autocast is on, as rotary positions of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_what_a_model_keeps_from_autocast_stays_so() -> None:
    """Casts are written out in the trace, and nothing is cast a second time when tiles run."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Precise(8), Precise(8)), torch.randn(2, 9, 8)

    def call(run: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).square().mean()

    compare(model, adjcomp.compile(model, chunk=4), call)


def test_a_default_of_filling_a_cache_is_left_out() -> None:
    """Models of transformers fill an inference cache by default; a step makes none, and says so where one is asked for."""
    ids = batch(9)
    model = FAMILIES["lfm2"].make(use_cache=True)
    compiled = adjcomp.compile(model, chunk=4)
    assert compiled(input_ids=ids, labels=ids).past_key_values is None
    assert model.config.use_cache is True
    with pytest.raises(adjcomp.CaptureError, match="use_cache"):
        compiled(input_ids=ids, labels=ids, use_cache=True)


def test_the_documents_list_the_families_that_are_tested() -> None:
    """Each class in the table of the page on capture is compared with plain autograd, here or by the cases of Mamba's own."""
    text = (ROOT / "docs" / "capture.md").read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`\w+ForCausalLM`.*?) \|", text, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    own = {"MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"}
    assert listed == own | {family.model for family in FAMILIES.values()}
