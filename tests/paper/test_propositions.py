"""Propositions 2 and 3 and Equation 7 as they are written, in O(T²) VJPs of single steps, against compiled models."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import fidelity
import pytest
import torch
from repository import ROOT
from torch import Tensor, nn

import adjcomp

pytestmark = pytest.mark.filterwarnings("ignore::adjcomp.variants.ApproximationWarning")
T = 7


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_model_example", ROOT / "examples" / "paper_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()


def make(structure: str, layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = EXAMPLE.PaperModel(structure, states=3, width=4, layers=layers, vocabulary=11).double()
    return model, torch.randint(0, 11, (1, T)), torch.randint(0, 11, (1, T))


def streams(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor]:
    """y_0 … y_K of (T, P), and dl/dy_K."""
    y = [model.embed(ids)]
    for layer in model.layers:
        y.append(y[-1] + layer(y[-1]))
    top = y[-1].detach().requires_grad_()
    loss = nn.functional.cross_entropy(model.head(model.norm(top)).flatten(0, 1), labels.flatten())
    return [value[0].detach() for value in y], torch.autograd.grad(loss, top)[0][0]


class Literal:
    """One layer at fixed inputs x (T, P), its networks step by step, and the sums of Proposition 2 over pairs of steps."""

    def __init__(self, layer: nn.Module, y: Tensor) -> None:
        self.layer, self.x = layer, layer.norm(y).detach()
        self.N, self.P, self.dense = layer.states, layer.width, layer.structure == "unstructured"
        self.h = [torch.zeros(self.N, dtype=y.dtype) if self.dense else torch.zeros(self.N, self.P, dtype=y.dtype)]
        for t in range(len(y)):
            A, b = self.transition(t), self.input(t, self.x[t])
            self.h.append((A @ self.h[-1] if self.dense else A[:, None] * self.h[-1]) + b)

    def transition(self, t: int) -> Tensor:
        """𝒜(x[t]): (N, N) or (N,)."""
        x = self.x[t]
        if self.dense:
            return torch.tanh(self.layer.A(x).view(self.N, self.N)) / self.N**0.5
        return torch.sigmoid(self.layer.A(x) + 2.0).expand(self.N)

    def matrix(self, t: int) -> Tensor:
        """ℬ(x[t]): (N, P) or (N,)."""
        return self.layer.B(self.x[t]).view(self.N, self.P) / self.P if self.dense else self.layer.B(self.x[t])

    def input(self, t: int, x: Tensor) -> Tensor:
        return self.matrix(t) @ x if self.dense else self.matrix(t)[:, None] * x

    def reader(self, t: int) -> Tensor:
        """𝒞(x[t]): (P, N) or (N,)."""
        return self.layer.C(self.x[t]).view(self.P, self.N) if self.dense else self.layer.C(self.x[t]) / self.N

    def adjoint(self, t: int, i: int) -> Tensor:
        """λ[t,i] = C[t] A[t] … A[i+1]."""
        found = self.reader(t)
        for s in range(t, i, -1):
            found = found @ self.transition(s) if self.dense else found * self.transition(s)
        return found.detach()

    def sums(self, v: Tensor, window: int = T) -> dict[str, Tensor]:
        """Σ over t and i of vjp(x[i]; v[t] λ[t,i] ⊗ …) for every parameter of the three networks."""
        total: dict[str, Tensor] = {}
        for t in range(len(self.x)):
            for i in range(max(0, t + 1 - window), t + 1):
                row = v[t] @ self.adjoint(t, i) if self.dense else torch.outer(self.adjoint(t, i), v[t])  # (N,) or (N, P)
                before = self.h[i].detach()
                into_A = torch.outer(row, before) if self.dense else (row * before).sum(1)
                into_B = torch.outer(row, self.x[i]) if self.dense else row @ self.x[i]
                self.add(total, "A", self.transition(i), into_A)
                self.add(total, "B", self.matrix(i), into_B)
            state = self.h[t + 1].detach()
            self.add(total, "C", self.reader(t), torch.outer(v[t], state) if self.dense else state @ v[t])
        return total

    def add(self, total: dict[str, Tensor], name: str, output: Tensor, cotangent: Tensor) -> None:
        """One VJP of a network."""
        network = getattr(self.layer, name)
        for key, grad in zip(("weight", "bias"), torch.autograd.grad(output, network.parameters(), cotangent), strict=True):
            total[f"{name}.{key}"] = total.get(f"{name}.{key}", torch.zeros_like(grad)) + grad


def gradients(model: nn.Module, ids: Tensor, labels: Tensor, **options: object) -> dict[str, Tensor]:
    compiled = adjcomp.compile(model, chunk=3, **options)
    return fidelity.measure(model, lambda: compiled(ids, labels)).grads


def error(got: dict[str, Tensor], want: dict[str, Tensor], layer: int) -> float:
    """Relative error over the networks of a layer."""
    pairs = [(got[f"layers.{layer}.{name}"], grad) for name, grad in want.items()]
    scale = sum(float(w.norm() ** 2) for _, w in pairs) ** 0.5
    return sum(float((g - w).norm() ** 2) for g, w in pairs) ** 0.5 / scale


@pytest.mark.parametrize("structure", EXAMPLE.STRUCTURES)
def test_proposition_2_is_the_gradient_of_one_layer(structure: str) -> None:
    """Given one layer, then the double sum of VJPs is the gradient, and Equation 7 is that of a window."""
    model, ids, labels = make(structure, 1)
    y, v = streams(model, ids, labels)
    literal = Literal(model.layers[0], y[0])
    assert error(gradients(model, ids, labels), literal.sums(v), 0) <= 1e-10
    assert error(gradients(model, ids, labels, adjoint_window=3), literal.sums(v, 3), 0) <= 1e-10


@pytest.mark.parametrize("window", [None, 2])
def test_proposition_3_is_the_residual_form_and_not_backpropagation(window: int | None) -> None:
    """Given three layers, then the sum with dl/dy_K in every layer is the residual form; only the top layer's is exact."""
    model, ids, labels = make("diagonal", 3)
    y, v = streams(model, ids, labels)
    exact = fidelity.measure(model, lambda: model(ids, labels)).grads
    residual = gradients(model, ids, labels, coupling="residual", adjoint_window=window)
    for k, layer in enumerate(model.layers):
        literal = Literal(layer, y[k]).sums(v, window or T)
        assert error(residual, literal, k) <= 1e-10
        if window is None:
            assert (error(exact, literal, k) <= 1e-10) == (k == 2)
            assert k == 2 or error(exact, literal, k) > 0.02


def test_the_exact_gradient_is_that_of_finite_differences() -> None:
    """Given a compiled model, then single entries of its gradient are central differences of the loss."""
    model, ids, labels = make("scalar", 2)
    found = gradients(model, ids, labels)
    step = 1e-5
    for name, parameter in model.named_parameters():
        flat, grad = parameter.data.view(-1), found[name].view(-1)
        place = int(grad.abs().argmax())
        around = []
        for sign in (1, -1):
            flat[place] += sign * step
            with torch.no_grad():
                around.append(float(model(ids, labels)))
            flat[place] -= sign * step
        assert abs((around[0] - around[1]) / (2 * step) - float(grad[place])) <= 1e-6 * float(grad.abs().max()) + 1e-9, name


def test_proposition_2_is_that_of_a_complex_step() -> None:
    """Given Σ v·y of one layer as an analytic function of 𝒜's weights, then Im f(θ + iε) / ε is the double sum's entry."""
    model, ids, labels = make("diagonal", 1)
    y, v = streams(model, ids, labels)
    literal = Literal(model.layers[0], y[0])
    weight, bias = model.layers[0].A.weight.detach(), model.layers[0].A.bias.detach()
    want, step = literal.sums(v)["A.weight"], 1e-30
    for n, p in ((0, 0), (1, 3), (2, 1)):
        bent = weight.to(torch.complex128)
        bent[n, p] += 1j * step
        h, total = torch.zeros(3, 4, dtype=torch.complex128), torch.zeros((), dtype=torch.complex128)
        for t in range(T):
            x = literal.x[t].to(torch.complex128)
            decay = 1 / (1 + torch.exp(-(bent @ x + bias + 2.0)))
            h = decay[:, None] * h + literal.input(t, literal.x[t]).detach()
            total = total + (v[t] * (literal.reader(t).detach().to(h.dtype) @ h)).sum()
        assert abs(float(total.imag) / step - float(want[n, p])) <= 1e-12
