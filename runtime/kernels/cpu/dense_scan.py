"""`adjcomp::dense_scan` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_scan import dense_scan, dense_scan_vjp

__all__ = ["dense_scan", "dense_scan_vjp"]
