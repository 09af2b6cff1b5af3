"""cuTile Python kernels for decoding one sequence, and the tools that prove them.

Nothing here knows of models, files or the command line. Kernels take device arrays (CuPy) or, through
`kernels.interpreter`, NumPy arrays; see docs/shapes.md for every layout.
"""
