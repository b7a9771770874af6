"""The C++ kernels on what only they can get wrong (threads, special values, layouts), and the torch forms that replace them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import STRATEGIES, relative_errors

from adjcomp import ops
from adjcomp.ops import reference
from adjcomp.runtime.kernels import registry
from adjcomp.runtime.kernels.cpu import causal_conv1d, counter_uniform, dense_scan, linear_scan, selective_scan, ssd

MODULES: dict[str, ModuleType] = {
    "linear_scan": linear_scan,
    "complex": linear_scan,
    "dense_scan": dense_scan,
    "selective_scan": selective_scan,
    "ssd": ssd,
    "causal_conv1d": causal_conv1d,
}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODULES)
def test_the_form_without_a_compiler_is_right_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[name], "load", lambda _: None)

    @given(STRATEGIES[name], st.sampled_from([torch.float32, torch.float64]))
    def run(build: object, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        errors = relative_errors(build(), dtype, floor=0.02)  # type: ignore[operator]
        assert max(errors.values()) <= (5e-6 if dtype == torch.float32 else 1e-12), errors

    run()


def test_uniforms_are_the_same_bits_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, offset = torch.tensor(-5), torch.tensor(1 << 40)
    native = ops.counter_uniform(seed, 17, (3, 5, 70), 1, offset)
    monkeypatch.setattr(counter_uniform, "load", lambda _: None)
    torch.testing.assert_close(ops.counter_uniform(seed, 17, (3, 5, 70), 1, offset), native, rtol=0, atol=0)


def scan_arguments(channels: int, steps: int = 70, states: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shape = (1, steps, channels)
    return {
        "x": torch.randn(shape),
        "dt": torch.rand(shape) * 0.1,
        "A": -torch.rand(channels, states) * 8,
        "B": torch.randn(1, steps, states),
        "C": torch.randn(1, steps, states),
        "z": torch.randn(shape),
    }


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.usefixtures("threads")
def test_any_number_of_threads_gives_the_same_numbers(count: int) -> None:
    args = {k: t.requires_grad_() for k, t in scan_arguments(300).items()}
    results = []
    for threads in (1, count):
        torch.set_num_threads(threads)
        y, _ = ops.selective_scan(**args)
        results.append([y, *torch.autograd.grad(y.sum(), list(args.values()))])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [0.1, 3.0, 30.0, 300.0])
def test_large_steps_are_right_on_every_path_of_the_exponential(size: float) -> None:
    args = scan_arguments(20)
    args["dt"] = args["dt"] * size
    got = ops.selective_scan(**args)
    want = reference.selective_scan(**{k: t.double() for k, t in args.items()})
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_rates_of_any_size_are_right(size: float) -> None:
    args = scan_arguments(20)
    args["A"][:, 3:9] *= 1e-3
    args["A"][4] = 0
    args["A"][::2] *= size
    args["dt"][:, :, ::2] /= size
    got = ops.selective_scan(**args)
    want = reference.selective_scan(**{k: t.double() for k, t in args.items()})
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=1e-7 * q.abs().max().item())


def test_results_that_go_past_the_caches_are_the_same() -> None:
    args = scan_arguments(512, steps=1030, states=3)
    results = []
    for first, last in ((0, 512), (0, 256), (256, 512)):
        part = {k: t if k in "BC" else t[first:last] if k == "A" else t[..., first:last] for k, t in args.items()}
        part = {k: t.detach().clone().requires_grad_() for k, t in part.items()}
        y, _ = ops.selective_scan(**part)
        results.append([y, *torch.autograd.grad(y.square().sum(), [part[k] for k in ("x", "dt", "z")])])
    whole, *halves = results
    for got, *want in zip(whole, *halves, strict=True):
        assert torch.equal(got, torch.cat(want, -1))


def test_growing_states_overflow_as_they_do_in_torch() -> None:
    args = scan_arguments(4, steps=3, states=2)
    args["A"] = torch.tensor([[-1.0, 2.0]]).expand(4, 2)
    args["dt"] = torch.full_like(args["dt"], 100.0)
    got, want = ops.selective_scan(**args), reference.selective_scan(**args)
    torch.testing.assert_close(got[0].isfinite(), want[0].isfinite())
    torch.testing.assert_close(got[1].isfinite(), want[1].isfinite())


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "z"])
def test_a_nan_reaches_what_it_reaches_in_torch(name: str) -> None:
    args = scan_arguments(20, steps=40, states=3)
    args[name].view(-1)[7] = torch.nan
    got, want = ops.selective_scan(**args), reference.selective_scan(**args)
    for p, q in zip(got, want, strict=True):
        assert torch.equal(p.isnan(), q.isnan())


def test_a_view_of_wider_rows_is_read_in_place() -> None:
    from adjcomp.runtime.kernels.cpu.native import rows

    wide = torch.randn(2, 30, 48)
    assert rows(wide[:, :, :20], torch.float32).data_ptr() == wide.data_ptr()
    expanded = torch.randn(20).expand(2, 30, 20)
    assert rows(expanded, torch.float32).stride() == (0, 0, 1)
    assert rows(torch.randn(2, 1, 1).expand(2, 30, 20), torch.float32).stride(-1) == 1


def test_registry_errors_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="device type 'xpu'; supported: cpu, cuda"):
        registry.module_name("ssd", "xpu")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="needs Triton, which is not installed"):
        registry.find.__wrapped__("ssd", "cuda")
