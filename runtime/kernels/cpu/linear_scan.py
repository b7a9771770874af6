"""`adjcomp::linear_scan` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_scan import linear_scan, linear_scan_vjp

__all__ = ["linear_scan", "linear_scan_vjp"]
