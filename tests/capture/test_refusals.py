"""What cannot be captured is refused by name, and a refused model is as it was: same tensors, same attributes, same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fidelity import Block, Residual, diagonal_stack, measure, tokens
from torch import Tensor, nn

import adjcomp

IDS = tokens(2, 12, vocab=31)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Identity and value of everything a module holds."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found.update({name: (id(t), t.detach().clone(), t.grad) for name, t in tensors.items()})
    return found


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    assert list(before) == list(after)
    for name, value in before.items():
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], Tensor):
            assert value[0] == after[name][0]
            assert torch.equal(value[1], after[name][1])
            assert value[2] is after[name][2]
        elif isinstance(value, dict):
            assert all(after[name][key] is item for key, item in value.items())
        else:
            assert after[name] is value or after[name] == value


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Wrapped(nn.Module):
    """A block that first does something to its input."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.change, self.calls = Block(8), change, 0
        self.scale = nn.Parameter(torch.ones(8))
        self.loose = [torch.ones(8, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.change(self, x))


def registers_a_hook(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad * 2)
    return y


def branches(_: nn.Module, x: Tensor) -> Tensor:
    return x * 0.5 if x.abs().max() > 1 else x


def reads_a_number(_: nn.Module, x: Tensor) -> Tensor:
    return x * x.mean().item()


def counts_calls(module: nn.Module, x: Tensor) -> Tensor:
    module.calls += 1
    return x


def changes_a_parameter(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.scale.mul_(0.5)
    return x * module.scale


def writes_behind_autograd(_: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y.detach().mul_(2)
    return y


def loops_over_time(_: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([x[:, t] for t in range(x.shape[1])], 1)


def reads_a_loose_tensor(module: nn.Module, x: Tensor) -> Tensor:
    return x * module.loose[0]


def looks_ahead(_: nn.Module, x: Tensor) -> Tensor:
    return x + nn.functional.pad(x[:, 1:], (0, 0, 0, 1))


def normalises_over_time(_: nn.Module, x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def sorts(_: nn.Module, x: Tensor) -> Tensor:
    return x.sort(1).values


REFUSED = [
    (lambda _, x: StraightThrough.apply(x), "StraightThrough"),
    (registers_a_hook, "register_hook"),
    (branches, "values of a tensor"),
    (reads_a_number, "item"),
    (counts_calls, "calls"),
    (changes_a_parameter, r"layers\.1\.scale"),
    (writes_behind_autograd, "behind autograd"),
    (loops_over_time, "linear_scan"),
    (reads_a_loose_tensor, "requires grad"),
    (looks_ahead, "pads the sequence"),
    (normalises_over_time, "reduces over time"),
    (sorts, "sort"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_refusal_names_module_and_reason_and_changes_nothing(change: Callable[..., Tensor], reason: str) -> None:
    torch.manual_seed(0)
    model = Residual([Block(8), Wrapped(change), Block(8)], 8)
    before = snapshot(model)
    with pytest.raises(adjcomp.CaptureError, match=reason) as caught:
        adjcomp.compile(model)(IDS)
    assert reason == "requires grad" or "layers.1" in str(caught.value)
    assert_untouched(before, model)


def test_an_exception_of_the_model_itself_names_its_place() -> None:
    def fails(_: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("no such table")

    model = Residual([Block(8), Wrapped(fails)], 8)
    before = snapshot(model)
    with pytest.raises(adjcomp.CaptureError, match="no such table"):
        adjcomp.compile(model)(IDS)
    assert_untouched(before, model)


def test_a_capture_that_succeeds_changes_nothing_either() -> None:
    model = diagonal_stack()
    model.layers[2] = model.layers[1]
    before = snapshot(model)
    adjcomp.compile(model)(IDS)
    assert_untouched(before, model)


def test_parameters_on_several_devices_are_named() -> None:
    model = diagonal_stack(layers=2)
    model.layers[1].to("meta")
    with pytest.raises(adjcomp.CaptureError, match=r"several devices.*meta"):
        adjcomp.compile(model)(IDS)


@pytest.mark.parametrize("call", [lambda m: m(), lambda m: m(None), lambda m: m(torch.tensor(3))])
def test_missing_inputs_are_named(call: Callable[[nn.Module], Any]) -> None:
    with pytest.raises((adjcomp.CaptureError, TypeError), match=r"tensor input|argument"):
        call(adjcomp.compile(diagonal_stack(layers=1)))


def test_integers_where_floats_are_needed() -> None:
    model = diagonal_stack(layers=1, vocab=None)
    with pytest.raises(adjcomp.CaptureError, match=r"embed.*(dtype|float)"):
        adjcomp.compile(model)(torch.ones(2, 12, 8, dtype=torch.long))


def test_floats_where_token_ids_are_needed() -> None:
    with pytest.raises(adjcomp.CaptureError, match="embed"):
        adjcomp.compile(diagonal_stack(layers=1))(torch.rand(2, 12))


def test_hooks_inside_are_refused_until_they_are_removed() -> None:
    model = diagonal_stack(layers=2)
    compiled = adjcomp.compile(model)
    handle = model.layers[1].norm.register_forward_hook(lambda *_: None)
    with pytest.raises(adjcomp.CaptureError, match=r"layers\.1\.norm"):
        compiled(IDS)
    handle.remove()
    compiled(IDS)


def test_no_residual_stack_is_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 31))
    with pytest.raises(adjcomp.CaptureError, match="no residual stack found"):
        adjcomp.compile(model)(IDS)


def test_a_reassigned_buffer_is_kept_up_to_date() -> None:
    """`self.count = self.count + 1` on a buffer is a change of that buffer, once a forward."""

    class Counting(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(x)

    model = Residual([Counting(8), Counting(8)], 8)
    compiled = adjcomp.compile(model, chunk=5)
    for _ in range(3):
        measure(model, lambda: compiled(IDS).sum())
    assert [float(layer.count) for layer in model.layers] == [3.0, 3.0]
