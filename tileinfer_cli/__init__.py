"""The command line of TileInfer: reads flags and keys, shows events. It never touches an array.

Refuses to import NumPy, CuPy, cuda.tile or kernels (tests/unit/test_imports.py holds this), so that
`tileinfer --help` costs little more than Python's own start.
"""
