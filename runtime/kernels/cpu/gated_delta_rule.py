"""`adjcomp::gated_delta_rule` on a CPU."""

from adjcomp.runtime.kernels.cpu.chunked_delta import gated_delta_rule, gated_delta_rule_vjp

__all__ = ["gated_delta_rule", "gated_delta_rule_vjp"]
