"""Triton kernels for layers of ReLUs on a GPU, with the plain versions beside this folder as their twins."""
