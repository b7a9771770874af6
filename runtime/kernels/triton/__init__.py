"""Triton kernels of the carried ops for NVIDIA and AMD GPUs. Its modules need Triton."""
