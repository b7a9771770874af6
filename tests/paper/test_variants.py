"""Compiled models under `adjoint_window` and `coupling="residual"`: gradients are the literal ones, whatever the chunks."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator

import fidelity
import generated
import paper_oracles
import pytest
import torch
from generated import BlockSpec, CallSpec, StackSpec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import adjcomp
from adjcomp.ir.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::adjcomp.variants.ApproximationWarning")
LINEAR = ("diagonal", "selective", "ssd", "complex", "delta")


class Dense(nn.Module):
    """A block with a full transition matrix a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.A, self.b, self.c, self.out = (nn.Linear(width, n) for n in (width * width, width, width, width))

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        A = torch.tanh(self.A(u).unflatten(-1, (x.shape[-1], x.shape[-1]))) * 0.4
        h, _ = adjcomp.ops.dense_scan(A, self.b(u))
        return x + self.out(self.c(u) * h)


@contextlib.contextmanager
def literal(window: int) -> Iterator[None]:
    """`adjcomp.ops` with states rebuilt inside of the window."""
    with pytest.MonkeyPatch.context() as patch:
        for name, op in paper_oracles.OPS.items():
            patch.setattr(adjcomp.ops, name, lambda *args, op=op, **kwargs: op(window, *args, **kwargs))
        yield


class Branching(nn.Module):
    """A block that is x + branch(x)."""

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def check_window(model: nn.Module, call: fidelity.Call, window: int, chunk: int | None, coupling: str = "exact") -> None:
    with literal(window):
        want = fidelity.measure(model, lambda: call(model))
    compiled = adjcomp.compile(model, chunk=chunk, adjoint_window=window, coupling=coupling)
    got = fidelity.measure(model, lambda: call(compiled))
    assert fidelity.distance(got, want) <= 1e-10
    assert torch.allclose(got.loss, want.loss, rtol=1e-12)


@pytest.mark.parametrize(
    ("mixer", "window", "chunk"),
    [("diagonal", 1, 5), ("selective", 4, 16), ("ssd", 9, 4), ("complex", 16, None), ("delta", 4, 5)],
)
def test_a_window_cuts_every_structure_as_the_literal_sum_does(mixer: str, window: int, chunk: int | None) -> None:
    """Given a stack of one kind of recurrence and a window, then gradients are those of states rebuilt inside of it."""
    spec = StackSpec((BlockSpec(mixer, gate=True), BlockSpec(mixer)), loss="shifted")
    check_window(generated.build(spec), generated.call_of(spec, CallSpec(2, 17)), window, chunk)


@pytest.mark.parametrize(("window", "chunk"), [(3, 5), (8, 3)])
def test_a_window_cuts_dense_transitions(window: int, chunk: int) -> None:
    """Given full transition matrices, then the windowed gradients are the literal ones."""
    torch.manual_seed(0)
    model = fidelity.Residual([Dense(3), Dense(3)], 3).double()
    ids = fidelity.tokens(2, 13, vocab=31)
    check_window(model, lambda m: m(ids).square().sum(), window, chunk)


@pytest.mark.slow
@given(
    st.builds(
        StackSpec,
        st.lists(st.builds(BlockSpec, st.sampled_from((*LINEAR, "conv")), mlp=st.booleans()), min_size=1, max_size=2).map(
            lambda found: (BlockSpec("diagonal"), *found)
        ),
        tokens=st.booleans(),
        tied=st.booleans(),
        loss=st.sampled_from(["outer", "shifted"]),
    ),
    generated.calls(14).filter(lambda call: call.length > 2),
    st.integers(1, 16),
)
def test_any_stack_any_window(spec: StackSpec, call: CallSpec, window: int) -> None:
    """Given any stack of recurrences and convolutions, then the windowed gradients are the literal ones."""
    check_window(generated.build(spec), generated.call_of(spec, call), window, call.chunk)


class Mixing(Branching):
    """x + branch(x) over a generated mixer."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(width), generated.Mixer(kind, width), nn.Linear(width, width)

    def branch(self, x: Tensor) -> Tensor:
        return self.out(self.mixer(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def stack_of(kinds: tuple[str, ...]) -> fidelity.Residual:
    torch.manual_seed(0)
    return fidelity.Residual([Mixing(kind, 6) for kind in kinds], 6).double()


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (None, 4), (3, 4)])
def test_residual_coupling_is_autograd_with_detached_layer_inputs(chunk: int | None, window: int | None) -> None:
    """Given a deep stack, then the residual form is autograd's gradient where every branch reads a constant."""
    model = stack_of(("diagonal", "delta", "selective"))
    ids = fidelity.tokens(2, 15, vocab=31)
    loss = lambda m: m(ids).square().sum()  # noqa: E731
    exact = fidelity.measure(model, lambda: loss(model))
    with pytest.MonkeyPatch.context() as patch, literal(window) if window else contextlib.nullcontext():
        patch.setattr(Mixing, "forward", lambda self, x: x + self.branch(x.detach()))
        want = fidelity.measure(model, lambda: loss(model))
    compiled = adjcomp.compile(model, coupling="residual", chunk=chunk, adjoint_window=window)
    got = fidelity.measure(model, lambda: loss(compiled))
    assert fidelity.distance(got, want) <= 1e-10
    assert fidelity.distance(want, exact) > 0.05
    top = {name: g for name, g in want.grads.items() if name.startswith("layers.2.")}
    if window is None:  # the top layer has no layer above it: its gradient is backpropagation's
        assert all(torch.allclose(g, exact.grads[name], rtol=1e-10) for name, g in top.items())


def test_no_cotangent_is_computed_for_a_layers_input() -> None:
    """Given residual coupling, then a tile's VJP hands its own cotangent on and makes none: a matrix product less."""
    model = stack_of(("diagonal", "diagonal"))
    for layer in model.layers:
        layer.norm = nn.LayerNorm(6, elementwise_affine=False)
    ids = fidelity.tokens(1, 8, vocab=31)
    forms = {}
    for coupling in ("exact", "residual"):
        compiled = adjcomp.compile(model, coupling=coupling, chunk=4)
        compiled(ids).sum().backward()
        forms[coupling] = compiled.plan.costs.layers[1]
    assert forms["residual"].adjoint_flops < forms["exact"].adjoint_flops
    assert forms["residual"].adjoint_workspace_bytes <= forms["exact"].adjoint_workspace_bytes


def test_published_models_run_in_both_forms() -> None:
    """Given a Mamba, then both options train it, and a window as long as the sequence changes nothing."""
    model = fidelity.mamba()
    ids = fidelity.tokens(1, 24)
    call = fidelity.next_token(ids)
    plain = fidelity.measure(model, lambda: call(model))
    whole = fidelity.measure(model, lambda: call(adjcomp.compile(model, adjoint_window=24, chunk=8)))
    assert fidelity.distance(whole, plain) <= 1e-5
    both = adjcomp.compile(model, adjoint_window=4, coupling="residual", chunk=8)
    got = fidelity.measure(model, lambda: call(both))
    assert fidelity.distance(got, plain) > 1e-3
    assert torch.allclose(got.loss, plain.loss, rtol=1e-5)
    assert both.stats.measured_peak_bytes <= both.stats.predicted_peak_bytes


def test_a_plan_says_that_it_is_an_approximation_and_refuses_to_run_another_gradient() -> None:
    """Given plans of several gradients, then each says what it is, survives JSON, and doesn't run where another is asked for."""
    model = stack_of(("diagonal",))
    ids = fidelity.tokens(1, 8, vocab=31)
    approximate = adjcomp.plan(model, seq_len=8, example_inputs=(ids,), adjoint_window=3, coupling="residual", chunk=4)
    exact = adjcomp.plan(model, seq_len=8, example_inputs=(ids,), chunk=4)
    assert "APPROXIMATION" in str(approximate)
    assert "adjoint_window=3" in str(approximate)
    assert "APPROXIMATION" not in str(exact)
    saved = Plan.from_json(approximate.to_json())
    assert (saved.costs.coupling, saved.costs.adjoint_window) == ("residual", 3)
    saved.verify()
    with pytest.raises(ValueError, match="another gradient"):
        adjcomp.compile(model, plan=saved)(ids)
    adjcomp.compile(model, plan=saved, adjoint_window=3, coupling="residual")(ids).sum().backward()
    older = json.loads(exact.to_json())
    del older["costs"]["coupling"], older["costs"]["adjoint_window"]
    assert Plan.from_json(json.dumps(older)).costs == exact.costs


def test_the_warning_comes_once() -> None:
    """Given an approximation, then compiling warns the first time and stays silent after."""
    model = stack_of(("diagonal",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adjcomp.compile(model, adjoint_window=12_345)
        adjcomp.compile(model, adjoint_window=12_345)
    assert [w.category for w in caught] == [adjcomp.ApproximationWarning]
    assert "approximation" in str(caught[0].message)


@pytest.mark.parametrize(
    ("bad", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError), ("8", TypeError)]
)
def test_windows_that_are_no_positive_integers_are_refused(bad: object, error: type[Exception]) -> None:
    """Given a window that is none, then the error names the option."""
    for make in (adjcomp.compile, lambda m, **options: adjcomp.plan(m, seq_len=4, **options)):
        with pytest.raises(error, match="adjoint_window"):
            make(stack_of(("diagonal",)), adjoint_window=bad)


def test_an_unknown_coupling_is_refused_with_the_accepted_ones() -> None:
    """Given another word, then the error lists both."""
    with pytest.raises(ValueError, match="'exact' or 'residual', not 'loose'"):
        adjcomp.compile(stack_of(("diagonal",)), coupling="loose")


class Gru(nn.Module):
    """A block whose recurrence isn't linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


@pytest.mark.parametrize("block", [Gru(4), generated.GeneratedBlock(BlockSpec("conv"), 4)], ids=["gru", "convolution"])
def test_models_without_a_linear_recurrence_have_nothing_to_truncate(block: nn.Module) -> None:
    """Given a recurrence that isn't linear, or none, then the error names the option and what is accepted."""
    model = fidelity.Residual([block], 4)
    with pytest.raises(adjcomp.CaptureError, match=r"adjoint_window=3 truncates linear recurrences.*adjcomp\.ops"):
        adjcomp.compile(model, adjoint_window=3)(fidelity.tokens(1, 8, vocab=31))


class PostNorm(nn.Module):
    """norm(x + f(x)): no path of identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), generated.Mixer("diagonal", width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mixer(x))


def test_layers_that_do_not_add_to_their_input_have_no_residual_form() -> None:
    """Given layers whose output is normalised, then residual coupling is refused and exact named."""
    model = fidelity.Residual([PostNorm(4), PostNorm(4)], 4)
    with pytest.raises(adjcomp.CaptureError, match=r"coupling='residual' needs layers that add.*coupling='exact'"):
        adjcomp.compile(model, coupling="residual")(fidelity.tokens(1, 8, vocab=31))


def test_a_final_state_with_a_gradient_is_refused_under_a_window() -> None:
    """Given a model that returns its last state, when a loss of it is taken, then the error names the option."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.maps, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            h, last = adjcomp.ops.linear_scan(torch.sigmoid(x), self.maps(x))
            return self.head(x + h), last

    out, last = adjcomp.compile(Stateful(), adjoint_window=3, chunk=4)(fidelity.tokens(1, 8, vocab=9))
    with pytest.raises(RuntimeError, match="adjoint_window"):
        (out.sum() + last.sum()).backward()
