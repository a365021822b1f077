"""Triton kernels, imported only where the device is CUDA or by tests through the interpreter."""
