"""The receipt of a quantised model, as `quantize` prints it and `show` repeats it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileinfer_cli import render

if TYPE_CHECKING:
    from tileinfer_cli.terminal import TextStream


def print_receipt(out: TextStream, receipt: dict[str, Any]) -> None:
    render.print_heading(out, f"Receipt: {receipt['model']} as INT8")
    render.print_pairs(out, [(name, value, None) for name, value in receipt_pairs(receipt)], indent="  ")
    render.print_heading(out, "\nLargest relative errors of a tensor (root mean square)")
    rows = [[f"  {e['name']}", e["format"], f"{e['relative_error'] * 100:.2f} %"] for e in receipt["worst"]]
    render.print_table(out, ["  TENSOR", "SCALES", "ERROR"], rows, right=[2])


def receipt_pairs(receipt: dict[str, Any]) -> list[tuple[str, str]]:
    """Sizes, recipe and loss in words."""
    size = render.bytes_text
    calibrated = ", errors compensated on a calibration text" if receipt["calibrated"] else ""
    pairs = [
        ("recipe", receipt["recipe"] + calibrated),
        ("size", f"{size(receipt['bytes_before'])} before, {size(receipt['bytes_after'])} after"),
        ("a weight", f"{receipt['bytes_per_weight']:.3f} bytes"),
    ]
    quality = receipt["quality"]
    if quality is None:
        return [*pairs, ("loss", f"not measured: {receipt['not_measured']}")]
    before, after = quality["perplexity_before"], quality["perplexity_after"]
    return [
        *pairs,
        ("perplexity", f"{before:.4f} before, {after:.4f} after ({quality['change'] * 100:+.2f} %)"),
        *divergence_pairs(quality),
        ("measured on", f"{quality['tokens']:,} tokens of {quality['text']}, {quality['backend']} backend"),
    ]


def divergence_pairs(found: dict[str, Any]) -> list[tuple[str, str]]:
    """KL divergence and agreement; `found` is a receipt's quality or a comparison."""
    return [
        ("KL divergence", f"{found['mean_kl']:.2e} nats mean, {found['kl_99']:.2e} at the 99th percentile"),
        ("same top token", f"{found['agreement'] * 100:.1f} %"),
    ]
