"""`adjcomp::counter_uniform` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_uniform import counter_uniform

__all__ = ["counter_uniform"]
