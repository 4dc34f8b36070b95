"""Addresses: byte layouts and the operations of the hot path, one op a file.

Every op has a plain-PyTorch twin of the same name in ``kernels/ref``: the twin is the
specification, the implementation on CPU, and what the GPU kernel is compared with.
"""
