"""Models as they are written with mamba_ssm, over stand-ins for that package: its functions need a GPU and so do nothing here.

`FUNCTIONS` holds plain forms of them; a test binds those to this module's names for the run that it compares with.
Legend: b batch, l time, d channels, n states, h heads, p channels of a head, g groups.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HOMES = {
    "mamba_ssm.ops.selective_scan_interface": ("selective_scan_fn", "mamba_inner_fn"),
    "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "mamba_ssm.ops.triton.layer_norm": ("layer_norm_fn", "rms_norm_fn"),
    "mamba_ssm.ops.triton.layernorm_gated": ("rmsnorm_fn",),
    "causal_conv1d.causal_conv1d_interface": ("causal_conv1d_fn",),
}


def _needs_a_gpu(name: str) -> Callable[..., Any]:
    def stand_in(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{name} needs a GPU")

    return stand_in


def packages() -> dict[str, types.ModuleType]:
    """Modules named as those of the packages, with their functions."""
    made = {}
    for home, names in HOMES.items():
        made[home] = types.ModuleType(home)
        vars(made[home]).update({name: _needs_a_gpu(name) for name in names})
    return made


def bind(modules: dict[str, types.ModuleType]) -> dict[str, Any]:
    """This module's names for the functions, one of them another than the package's."""
    names = {name: getattr(modules[home], name) for home, names in HOMES.items() for name in names}
    return {
        **{name: f for name, f in names.items() if name != "causal_conv1d_fn"},
        "conv_under_another_name": names["causal_conv1d_fn"],
    }


def conv_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    width = weight.shape[1]
    y = functional.conv1d(functional.pad(x, (width - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    return y if activation is None else functional.silu(y)


def scan_plain(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
) -> Tensor:
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    dt = functional.softplus(dt) if delta_softplus else dt
    B, C = (t if t.dim() == 3 else t.repeat_interleave(u.shape[1] // t.shape[1], 1) for t in (B, C))
    B, C = (t[:, None].expand(-1, u.shape[1], -1, -1) if t.dim() == 3 else t for t in (B, C))  # (b, d, n, l)
    state, ys = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        state = torch.exp(dt[:, :, t, None] * A) * state + (dt * u)[:, :, t, None] * B[..., t]
        ys.append((state * C[..., t]).sum(-1))
    y = torch.stack(ys, 2) if D is None else torch.stack(ys, 2) + D[:, None] * u
    return y if z is None else y * functional.silu(z)


def inner_plain(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    out: Tensor,
    out_bias: Any,
    A: Tensor,
    B: None,
    C: None,
    D: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> Tensor:
    x, z = xz.chunk(2, 1)
    x = conv_plain(x, conv_weight[:, 0], conv_bias, "silu")
    dt, B_, C_ = functional.linear(x.mT, x_proj).split([dt_proj.shape[1], A.shape[1], A.shape[1]], -1)
    y = scan_plain(x, functional.linear(dt, dt_proj).mT, A, B_.mT, C_.mT, D, z, delta_bias, delta_softplus)
    return functional.linear(y.mT, out, out_bias)


def chunk_scan_plain(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
) -> Tensor:
    b, length, h, p = x.shape

    def channels(t: Tensor) -> Tensor:
        return t.reshape(b, length, h * p).mT

    dt = functional.softplus(dt + dt_bias) if dt_softplus else dt
    groups = [t.permute(0, 2, 3, 1) for t in (B, C)]
    skip = D if D.dim() == 2 else D[:, None].expand(h, p)
    y = scan_plain(
        channels(x),
        channels(dt[..., None].expand(x.shape)),
        A[:, None, None].expand(h, p, B.shape[-1]).reshape(h * p, -1),
        *groups,
        skip.reshape(-1),
        None if z is None else channels(z),
    )
    return y.mT.reshape(x.shape)


def gated_plain(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, group_size: int, norm_before_gate: bool) -> Tensor:
    x = x if norm_before_gate else x * functional.silu(z)
    y = functional.rms_norm(x.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight
    return y * functional.silu(z) if norm_before_gate else y


def split_plain(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    rmsnorm_weight: Any,
    rmsnorm_eps: float,
    outproj_weight: Tensor,
    outproj_bias: Any,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
) -> Tensor:
    inner = D.shape[0] * headdim
    wide = conv_weight.shape[0]
    beside = (zxbcdt.shape[-1] - inner - wide - D.shape[0]) // 2
    gate, value, z, xbc, dt = zxbcdt.split([beside, beside, inner, wide, D.shape[0]], -1)
    x, B, C = conv_plain(xbc.mT, conv_weight, conv_bias, "silu").mT.split([inner, (wide - inner) // 2, (wide - inner) // 2], -1)
    heads, (B, C) = (D.shape[0], headdim), (t.unflatten(-1, (ngroups, -1)) for t in (B, C))
    y = chunk_scan_plain(x.unflatten(-1, heads), dt, A, B, C, chunk_size, D, None, dt_bias, True).flatten(-2)
    y = gated_plain(y, rmsnorm_weight, None, z, rmsnorm_eps, inner // ngroups, norm_before_gate)
    return functional.linear(torch.cat([functional.silu(gate) * value, y], -1), outproj_weight, outproj_bias)


def norm_plain(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    residual: Any = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    total = x if residual is None else x + residual
    shape = (x.shape[-1],)
    y = functional.rms_norm(total, shape, weight, eps) if is_rms_norm else functional.layer_norm(total, shape, weight, bias, eps)
    return (y, total) if prenorm else y


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "selective_scan_fn": scan_plain,
    "mamba_inner_fn": inner_plain,
    "mamba_chunk_scan_combined": chunk_scan_plain,
    "mamba_split_conv1d_scan_combined": split_plain,
    "layer_norm_fn": norm_plain,
    "rms_norm_fn": lambda *args, **kwargs: norm_plain(*args, **kwargs, is_rms_norm=True),
    "rmsnorm_fn": gated_plain,
    "conv_under_another_name": conv_plain,
}
_HERE = sys.modules[__name__]


def _use(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_HERE, name)
    return function


class Mixer1(nn.Module):
    """A Mamba-1 mixer, channels before time; `fast` calls one kernel for all of it."""

    def __init__(self, d: int, fast: bool, groups: int = 0, n: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.fast, self.groups, self.sizes = fast, groups, [rank, n * max(groups, 1), n * max(groups, 1)]
        self.in_proj, self.out_proj = nn.Linear(d, 4 * d, bias=False), nn.Linear(2 * d, d)
        self.conv1d = nn.Conv1d(2 * d, 2 * d, 4, groups=2 * d, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(2 * d, sum(self.sizes), bias=False), nn.Linear(rank, 2 * d)
        self.A_log, self.D = nn.Parameter(torch.rand(2 * d, n)), nn.Parameter(torch.ones(2 * d))

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        xz = (self.in_proj.weight @ x.permute(2, 0, 1).reshape(x.shape[2], b * length)).reshape(-1, b, length).transpose(0, 1)
        A = -torch.exp(self.A_log)
        if self.fast:
            conv, out = self.conv1d, self.out_proj
            weights = (self.x_proj.weight, self.dt_proj.weight, out.weight, out.bias)
            return _use("mamba_inner_fn")(
                xz, conv.weight, conv.bias, *weights, A, None, None, self.D, delta_bias=self.dt_proj.bias, delta_softplus=True
            )
        u, z = xz.chunk(2, dim=1)
        u = _use("conv_under_another_name")(u, self.conv1d.weight[:, 0], bias=self.conv1d.bias, activation="silu")
        dt, B, C = self.x_proj(u.transpose(1, 2).reshape(b * length, -1)).split(self.sizes, -1)
        dt = (self.dt_proj.weight @ dt.t()).reshape(-1, b, length).transpose(0, 1)
        shape = (b, length, self.groups, -1) if self.groups else (b, length, -1)
        order = (0, 2, 3, 1) if self.groups else (0, 2, 1)
        B, C = (t.reshape(shape).permute(order).contiguous() for t in (B, C))
        y = _use("selective_scan_fn")(u, dt, A, B, C, self.D, z=z, delta_bias=self.dt_proj.bias, delta_softplus=True)
        return self.out_proj(y.transpose(1, 2))


class Mixer2(nn.Module):
    """A Mamba-2 mixer with an MLP beside its heads; `fast` calls one kernel for all of it."""

    def __init__(self, d: int, fast: bool, h: int = 4, p: int = 4, n: int = 5, g: int = 2) -> None:
        super().__init__()
        self.fast, self.h, self.p, self.n, self.g = fast, h, p, n, g
        inner, wide = h * p, h * p + 2 * g * n
        self.splits = [2 * d - inner, 2 * d - inner, inner, wide, h]
        self.in_proj, self.out_proj = nn.Linear(d, sum(self.splits)), nn.Linear(2 * d, d)
        self.conv1d = nn.Conv1d(wide, wide, 4, groups=wide, padding=3)
        self.dt_bias, self.A_log = nn.Parameter(torch.rand(h)), nn.Parameter(torch.rand(h))
        self.D = nn.Parameter(torch.ones(h) if fast else torch.ones(h, p))
        self.norm = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        zxbcdt, A = self.in_proj(x), -torch.exp(self.A_log)
        if self.fast:
            norm = {"rmsnorm_weight": self.norm, "rmsnorm_eps": 1e-5, "norm_before_gate": False}
            out = {"outproj_weight": self.out_proj.weight, "outproj_bias": self.out_proj.bias}
            weights = (self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, A, self.D)
            kernel = _use("mamba_split_conv1d_scan_combined")
            return kernel(zxbcdt, *weights, 8, **norm, **out, headdim=self.p, ngroups=self.g)
        gate, value, z, xbc, dt = zxbcdt.split(self.splits, -1)
        xbc = functional.silu(self.conv1d(xbc.transpose(1, 2)).transpose(1, 2)[:, :-3])  # torch's own convolution, cut afterwards
        inner = self.h * self.p
        u, B, C = xbc.split([inner, self.g * self.n, self.g * self.n], -1)
        u, B, C = u.unflatten(-1, (self.h, self.p)), B.unflatten(-1, (self.g, self.n)), C.unflatten(-1, (self.g, self.n))
        y = _use("mamba_chunk_scan_combined")(u, dt, A, B, C, 8, self.D, None, dt_bias=self.dt_bias, dt_softplus=True).flatten(-2)
        y = _use("rmsnorm_fn")(y, self.norm, None, z, eps=1e-5, group_size=inner // self.g, norm_before_gate=True)
        return self.out_proj(torch.cat([functional.silu(gate) * value, y], -1))


class Model(nn.Module):
    """Blocks that hand on their output and the residual, which the next block's norm adds up."""

    def __init__(self, mixer: Callable[[int], nn.Module], rms: bool, d: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, d)
        self.mixers = nn.ModuleList(mixer(d) for _ in range(layers))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(d)) for _ in range(layers + 1))
        self.shift, self.rms = (None if rms else nn.Parameter(torch.zeros(d))), rms

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, residual = self.embedding(input_ids), None
        for scale, mixer in zip(self.scales, self.mixers, strict=False):
            options = {"residual": residual, "prenorm": True, "residual_in_fp32": True, "is_rms_norm": self.rms}
            hidden, residual = _use("layer_norm_fn")(hidden, scale, self.shift, eps=1e-5, **options)
            hidden = mixer(hidden)
        if self.rms:
            return _use("rms_norm_fn")(hidden, self.scales[-1], None, residual=residual, eps=1e-5) @ self.embedding.weight.t()
        normed = _use("layer_norm_fn")(hidden, self.scales[-1], self.shift, residual=residual, eps=1e-5)
        return normed @ self.embedding.weight.t()


MODELS: dict[str, Callable[[], Model]] = {
    "mamba": lambda: Model(lambda d: Mixer1(d, fast=True), rms=True),
    "mamba by parts": lambda: Model(lambda d: Mixer1(d, fast=False), rms=False),
    "mamba in groups": lambda: Model(lambda d: Mixer1(d, fast=False, groups=2), rms=True),
    "mamba2": lambda: Model(lambda d: Mixer2(d, fast=True), rms=True),
    "mamba2 by parts": lambda: Model(lambda d: Mixer2(d, fast=False), rms=True),
}
