"""The CUDA backend: the only package that imports CuPy and `kernels`.

    device.py       what a device must offer: memory, copies, recorded steps; gpu.py is the real one on CuPy,
                    interpreted.py runs the same kernels on NumPy arrays, so that all of this is tested on any machine
    memory.py       what fits, decided before anything is loaded
    loader.py       stored tensors -> device memory through two pinned buffers
    kv_pool.py      pages of keys and values, and the block table on the device
    buffers.py      every array a step works in, made once, never resized
    plan.py         the launches of each kind of step, as data, from what the model declares
    graphs.py       recorded steps, made once each when first needed
    warmup.py       all kernels compiled in parallel before the first token
    runner.py       Runner: prefill in chunks, the decode loop one step behind the device

It refuses, by name, models whose shapes the kernels don't take; it never falls back to the CPU by itself.
"""
