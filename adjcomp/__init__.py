"""Train state-space and recurrent models on very long sequences within a byte budget, with exact gradients."""

import adjcomp.runtime.kernels.registry  # noqa: F401 - registers the kernels of adjcomp.ops
from adjcomp import ops

__all__ = ["ops"]
