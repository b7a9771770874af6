"""The knobs of planning and running that a budget alone can't express."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adjcomp.units import parse_bytes

PLACEMENTS = (None, "layers", "time", "grid")


@dataclass(frozen=True)
class Options:
    """Options of `adjcomp.compile` and `adjcomp.plan`.

    Attributes:
        placement: how planning spreads over several devices: None (the planner decides), "layers", "time" or "grid"
            (contiguous layers, each on several devices that take the chunks in turn).
        deterministic: kernels in fixed configurations (no kernel uses atomics) and plans without timings, so that equal runs on
            one device give equal bits. Operations of torch's own follow `torch.use_deterministic_algorithms`.
        solver_time_limit_seconds: deterministic seconds the solver may search (they count work, not the clock, so that
            equal input gives equal plans); None for the default, 0 for the constructive plan alone.
        collective_timeout_seconds: how long a rank waits for another before it raises.
        streams: on one device, VJPs that don't wait for each other (those of one chunk under coupling="residual") run on up to so
            many of its streams side by side, where the budget has room for it.
        cuda_graphs: whether tiles of residual layers are recorded as CUDA graphs and replayed, one launch instead of one for each
            kernel. False, the default until they have been measured on a GPU: none. None: those that take longer to launch than
            to run, where the memory that it takes is a small part of the budget. True: all. Under a mesh, with several streams,
            and on a CPU, none are.
        host_budget: pinned host memory, as bytes or a string such as "64GiB", that borders of a plan for one accelerator may be
            spilled to; None: they stay on the device.
        border_dtype: "bfloat16" lets plans for one device keep borders, the states that chunks are recomputed from, in lower
            precision: an approximation of the gradient. None: they keep their own.
        summaries: whether contiguous ranges of time on several devices are joined by summaries of what each does to any state, so
            that none waits for those before it (True), or hand their states on as they go (False). None: what is faster. Two
            ranges always hand on.
        adjoint_norms: note the norm of the adjoint state at every border, in `compiled.stats.adjoint_norms`.
    """

    placement: str | None = None
    deterministic: bool = False
    solver_time_limit_seconds: float | None = None
    collective_timeout_seconds: float = 600.0
    adjoint_norms: bool = False
    streams: int = 1
    cuda_graphs: bool | None = False
    host_budget: int | str | None = None
    border_dtype: str | None = None
    summaries: bool | None = None

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement must be None, 'layers', 'time' or 'grid', not {self.placement!r}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False, not {self.deterministic!r}")
        if not isinstance(self.adjoint_norms, bool):
            raise TypeError(f"adjoint_norms must be True or False, not {self.adjoint_norms!r}")
        if isinstance(self.streams, bool) or not isinstance(self.streams, int):
            raise TypeError(f"streams must be a number of streams, not {self.streams!r}")
        if self.streams < 1:
            raise ValueError(f"streams must be at least 1, not {self.streams}")
        if not (self.cuda_graphs is None or isinstance(self.cuda_graphs, bool)):
            raise TypeError(f"cuda_graphs must be True, False or None, not {self.cuda_graphs!r}")
        if not (self.summaries is None or isinstance(self.summaries, bool)):
            raise TypeError(f"summaries must be True, False or None, not {self.summaries!r}")
        if self.host_budget is not None:
            parse_bytes(self.host_budget)
        if self.border_dtype not in (None, "bfloat16"):
            raise ValueError(f"border_dtype must be None or 'bfloat16', not {self.border_dtype!r}")
        if self.solver_time_limit_seconds is not None:
            _check_seconds("solver_time_limit_seconds", self.solver_time_limit_seconds, zero=True)
        _check_seconds("collective_timeout_seconds", self.collective_timeout_seconds, zero=False)


def _check_seconds(name: str, value: object, *, zero: bool) -> None:
    """TypeError or ValueError unless `value` is a finite number of seconds above zero (or zero where `zero` allows it)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number of seconds {'of at least' if zero else 'above'} zero, not {value!r}")
