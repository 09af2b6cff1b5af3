"""The lab: what the compiler makes of a choice, what a launch would compile, what a step consists of.

    probes/      one question a file, as variants of one kernel
    probe.py     finds and runs them: equality in the interpreter, code for any target
    code.py      what a variant compiled to; its Tile IR and SASS on disk
    explain.py   which specialisations a launch makes, and why
    census.py    the kernels of a step with the bytes they move and the rows that configured them

Times are taken by tileinfer_core/backends/cuda, which has the GPU.
"""
