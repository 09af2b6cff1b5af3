"""The one table of tolerances, and the comparison that uses it."""

from __future__ import annotations

import numpy as np

# largest ‖out − ref‖ / ‖ref‖ of a kernel whose output has this type, against a float64 reference on the same inputs
TOLERANCE = {"float32": 5e-5, "float16": 1e-3, "bfloat16": 1e-2}


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """‖out − ref‖ / ‖ref‖ in float64; the plain norm of `out` where the reference is zero. NaN stays NaN."""
    wide, want = np.asarray(out).astype(np.float64), np.asarray(reference).astype(np.float64)
    norm = float(np.linalg.norm(want))
    distance = float(np.linalg.norm(wide - want))
    return distance / norm if norm > 0 else distance


def assert_close(out: np.ndarray, reference: np.ndarray, dtype: str | None = None) -> None:
    """Hold `out` to the tolerance of its type, or of `dtype` where the values were rounded to it on their way.

    A NaN or an infinity that the reference does not have never passes.
    """
    name = str(np.asarray(out).dtype) if dtype is None else dtype
    wide, want = np.asarray(out).astype(np.float64), np.asarray(reference).astype(np.float64)
    if wide.shape != want.shape:
        raise AssertionError(f"shape {wide.shape}, the reference has {want.shape}")
    finite = np.isfinite(want)
    error = relative_error(np.where(finite, wide, 0), np.where(finite, want, 0))
    if not error <= TOLERANCE[name]:
        worst = np.unravel_index(np.nanargmax(np.abs(wide - want)) if not np.isnan(wide).all() else 0, wide.shape)
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"relative error {error:.2e}, {name} allows {TOLERANCE[name]:.0e}; at {at} {wide[at]}, expected {want[at]}"
        )
    if not np.array_equal(wide[~finite], want[~finite], equal_nan=True):
        raise AssertionError("infinities or NaNs differ from the reference's")
