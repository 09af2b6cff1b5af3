"""For all tests, before NumPy is imported.

BLAS gets one thread. The tests' matrices are tiny, and on a machine that is busy with other work two BLAS threads that
wait for each other made the same tests take 181 s instead of 41 s.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
