"""Kernels for CPUs: C++ that is compiled at first use, and torch code where there is no compiler."""
