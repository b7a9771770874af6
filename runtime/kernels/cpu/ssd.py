"""`adjcomp::ssd` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_ssd import ssd, ssd_vjp

__all__ = ["ssd", "ssd_vjp"]
