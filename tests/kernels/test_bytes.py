"""Kernels that memory bounds say how many bytes they move; in Triton's interpreter they are counted (check_traffic.py)."""

from __future__ import annotations

import pytest
from repository import ROOT

KERNELS = ROOT / "runtime" / "kernels"
BOUND_BY_MEMORY = (
    *(
        f"cpu/{name}.cpp"
        for name in ("causal_conv1d", "counter_uniform", "dense_scan", "linear_scan", "rms_norm", "softmax_rows")
    ),
    *(f"cpu/selective_{way}.h" for way in ("forward", "vjp")),
    *(f"triton/{name}_kernels.py" for name in ("causal_conv1d", "dense_scan", "selective_scan", "selective_scan_vjp")),
    *(f"triton/{name}.py" for name in ("counter_uniform", "linear_cross_entropy", "linear_scan_kernels", "rms_norm")),
)


@pytest.mark.parametrize("name", BOUND_BY_MEMORY)
def test_the_bytes_are_stated(name: str) -> None:
    text = (KERNELS / name).read_text()
    assert "Bytes:" in text or "Bytes of" in text or "Bytes moved:" in text
