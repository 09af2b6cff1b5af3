"""The place of the CUDA backend: the only package that will import CuPy and `kernels`.

Not part of this version. What it must offer is `Runner` of backends/base.py; backends/select.py decides who gets it.
"""
