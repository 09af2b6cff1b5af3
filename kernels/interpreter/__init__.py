"""Runs any cuTile kernel on NumPy arrays, block by block, and finds what a GPU does not.

    launcher = InterpreterLauncher("sm_90", pdl=True)
    launcher(kernel, (blocks, 1, 1), (x, y, 64))

Each fault raises InterpreterError naming kernel, block, source line, operation, array and indices:

- a tile wholly out of bounds; `check_bounds=False` on a tile that overhangs; a side that is no power of two
- padding left undetermined, memory nothing wrote (`uninitialised`), a float cast to an integer that cannot hold it,
  or a shift by too many bits, where it reaches a store, an atomic, an index or a branch. Masking it with ct.where, or
  storing it out of bounds, is fine, as on a GPU
- two blocks that write one element without atomics; a block that reads what another writes, unless it masks the value
  or multiplies it by an exact zero
- arguments that share memory, where one is written
- under PDL: a read of an earlier kernel's output before the wait, a store before it, a block that never waits (races.py
  has the exception: where only the kernel before can still run)
- types the compiler refuses (a float32 tile stored into BF16, FP16 with BF16), integer division by zero

Small tiles cost some 2 µs an operation, a fifth of it for the checks.

It refuses to guess: an operation it does not know stops by name. What only the compiler knows (registers, a loop
variable that changes its type, an index into a tuple that is no constant) is `kernels.compile`'s business.
"""

from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.launcher import InterpreterLauncher
from kernels.interpreter.memory import initialise, uninitialised, unwritten

__all__ = ["InterpreterError", "InterpreterLauncher", "initialise", "uninitialised", "unwritten"]
