"""`adjcomp::causal_conv1d` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_conv import causal_conv1d, causal_conv1d_vjp

__all__ = ["causal_conv1d", "causal_conv1d_vjp"]
