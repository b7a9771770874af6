"""Whole training steps through Triton's kernels, in the interpreter: planned and run as on a GPU, against plain autograd.

Collected as check_ops.py is. Here programs meet these kernels: layouts that the trace promised, accumulators that kernels add to.
"""

from __future__ import annotations

import interpreted  # noqa: F401 - it sends the ops to their Triton kernels
import pytest
import torch
from fidelity import FAMILIES, compare, next_token, tightest, tokens
from generated import BlockSpec, CallSpec, StackSpec, build, call_of

import adjcomp

CHUNK = 4  # of 10 tokens: two whole chunks and a shorter one
HEAVY = [pytest.param(mixer, marks=pytest.mark.slow) for mixer in ("diagonal", "ssd", "delta")]
FAMILY = [pytest.param("mamba", True, marks=pytest.mark.slow), ("mamba", False)]
FAMILY += [pytest.param("mamba2", tight, marks=pytest.mark.slow) for tight in (True, False)]


@pytest.mark.parametrize("mixer", ["selective", "complex", *HEAVY])
def test_stack_of_ops(mixer: str) -> None:
    """Given a block of each kind and the least budget, then gradients are those of plain autograd through the same kernels."""
    spec = StackSpec((BlockSpec(mixer, "rms", gate=True),), loss="shifted")
    model, call = build(spec, torch.float32), call_of(spec, CallSpec(1, 10), torch.float32)
    compare(model, adjcomp.compile(model, tightest(model, call, CHUNK), chunk=CHUNK), call)


@pytest.mark.parametrize(("family", "tight"), FAMILY)
def test_transformers_model(family: str, tight: bool) -> None:
    """Given a model of transformers, whose own forward knows nothing of these kernels, then gradients are equal."""
    model, call = FAMILIES[family](num_hidden_layers=1), next_token(tokens(1, 10))
    compare(model, adjcomp.compile(model, tightest(model, call, CHUNK) if tight else "64MiB", chunk=CHUNK), call)
