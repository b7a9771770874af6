"""`adjcomp::selective_scan` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_selective import selective_scan, selective_scan_vjp

__all__ = ["selective_scan", "selective_scan_vjp"]
