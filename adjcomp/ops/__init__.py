"""The carried ops: recurrences, convolution, attention, norm, loss and random numbers as `torch.library` ops in the namespace
`adjcomp`.

Time is dimension 1 everywhere. Every recurrence returns its outgoing state; states given and returned carry gradients. Inputs may
be float64, float32, bfloat16 or float16 and may be mixed; arithmetic and states are float32, or float64 where an input is.
"""

import adjcomp.ops.windowed
from adjcomp.ops.attention import causal_attention
from adjcomp.ops.conv import causal_conv1d
from adjcomp.ops.delta import gated_delta_rule
from adjcomp.ops.dual import ssd
from adjcomp.ops.grouped import grouped_linear
from adjcomp.ops.linear_attention import linear_attention
from adjcomp.ops.logsum import logcumsumexp
from adjcomp.ops.loss import linear_cross_entropy
from adjcomp.ops.max_plus import max_plus_scan
from adjcomp.ops.norm import rms_norm
from adjcomp.ops.scan import dense_scan, linear_scan
from adjcomp.ops.selective import selective_scan
from adjcomp.ops.summaries import (
    dense_scan_adjoint_summary,
    dense_scan_summary,
    gated_delta_rule_adjoint_summary,
    gated_delta_rule_summary,
    linear_scan_adjoint_summary,
    linear_scan_summary,
    selective_scan_adjoint_summary,
    selective_scan_summary,
    ssd_adjoint_summary,
    ssd_summary,
)
from adjcomp.ops.uniform import counter_uniform

__all__ = [
    "causal_attention",
    "causal_conv1d",
    "counter_uniform",
    "dense_scan",
    "dense_scan_adjoint_summary",
    "dense_scan_summary",
    "gated_delta_rule",
    "gated_delta_rule_adjoint_summary",
    "gated_delta_rule_summary",
    "grouped_linear",
    "linear_attention",
    "linear_cross_entropy",
    "linear_scan",
    "linear_scan_adjoint_summary",
    "linear_scan_summary",
    "logcumsumexp",
    "max_plus_scan",
    "rms_norm",
    "selective_scan",
    "selective_scan_adjoint_summary",
    "selective_scan_summary",
    "ssd",
    "ssd_adjoint_summary",
    "ssd_summary",
]

import adjcomp.runtime.kernels.registry  # noqa: F401 - last: it registers kernels for the ops declared above
