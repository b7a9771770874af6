"""The softmax of blocks of logits on a CPU: softmax_rows.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from adjcomp.runtime.kernels.cpu.native import Argument, Matrix, load, run, suffix, threads_for

DTYPES = (torch.float32, torch.float64)


class Arguments(ctypes.Structure):
    """Mirrors `Arguments` of softmax_rows.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "size", "start", "threads")),
        ("logits", Matrix),
        *((name, ctypes.c_void_p) for name in ("labels", "total", "picked", "norm", "scale")),
    )


def is_native(logits_rv: Tensor) -> bool:
    """Whether the functions of this module take a block of logits."""
    return logits_rv.device.type == "cpu" and logits_rv.dtype in DTYPES and load("softmax_rows") is not None


def _run(entry: str, logits_rv: Tensor, start: int, rows: dict[str, Tensor]) -> None:
    sizes = {"count": logits_rv.shape[0], "size": logits_rv.shape[1], "start": start, "threads": threads_for(logits_rv.numel())}
    values: dict[str, Argument] = {**sizes, "logits": logits_rv[None], **rows}
    run("softmax_rows", f"{entry}_{suffix(logits_rv.dtype)}", Arguments, values)


def join(logits_rv: Tensor, labels_r: Tensor, start: int, total_r: Tensor, picked_r: Tensor) -> None:
    """Joins a block to each row's log-sum-exp, and picks the label's logit where the block holds it; in place.

    logits_rv: (r, v) dense, vocabulary entries start … labels_r: (r), int64. total_r, picked_r: (r) of the logits' dtype.
    """
    _run("join", logits_rv, start, {"labels": labels_r, "total": total_r, "picked": picked_r})


def vjp(logits_rv: Tensor, labels_r: Tensor, start: int, norm_r: Tensor, scale_r: Tensor) -> None:
    """Turns a block of logits into their cotangent, (softmax - onehot) scale, in place. norm_r: each row's log-sum-exp."""
    _run("vjp", logits_rv, start, {"labels": labels_r, "norm": norm_r, "scale": scale_r})
