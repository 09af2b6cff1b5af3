"""One question to the compiler in each file: kernels that compute the same thing, written differently.

A file uses cuda.tile alone, so that it can go into a bug report as it is. It defines

    arrays(small)    name -> (shape, dtype, fill)
                     fill: ("normal", scale), ("int8",), ("count",), ("steps", n), ("value", n), ("zeros",), ("out",),
                     ("transposed", name)
    variants(small)  name -> {"steps": [(kernel, grid, args)] or [(kernel, grid, args, hints)], "out": array name, …}
                     args: an array's name, (name, shape) or (name, shape, first element) for a view, or a constant

Variants with the same "group" (default "") must have equal "out" arrays, within "tolerance" (default 1e-3 of the
largest value; 0: every bit). "pick" is the part of "out" that is compared, "pdl": True launches each step as a
dependent of the one before. `small` asks for shapes that the interpreter runs in a moment. A variant's time is
divided by its "count" (default: its steps). The docstring's first line is the question.
"""
