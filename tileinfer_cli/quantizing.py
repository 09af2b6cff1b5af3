"""What `quantize` and `pull --quantize` share: flags checked first, then the plan, the run, the receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_cli import opening, render
from tileinfer_cli.prompt import read_text
from tileinfer_cli.receipt_table import print_receipt
from tileinfer_core.errors import DiskError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.options import QuantizeFlags
    from tileinfer_core.quantize import QuantizePlan
    from tileinfer_core.settings import Settings
    from tileinfer_core.store import ModelFolder


def check(how: QuantizeFlags, *, wanted: bool) -> None:
    """Refuses flags that can't be, or that nothing would read, before anything is fetched."""
    from tileinfer_core.quantize_recipe import Recipe

    Recipe(how.group_size)
    if how.eval_tokens < 0:
        raise UsageError(f"--eval-tokens must be at least 0, found {how.eval_tokens}")
    given = {"--group-size": how.group_size, "--embedding": how.embedding, "--calibrate": how.calibrate}
    for flag, value in given.items():
        if value is not None and not wanted:
            raise UsageError(f"{flag} has no effect without --quantize")


def plan_of(
    settings: Settings, source: ModelFolder, dest: Path | None, how: QuantizeFlags, *, kv: str | None, force: bool
) -> QuantizePlan:
    from tileinfer_core.files import expanded
    from tileinfer_core.quantize import load_unquantised, plan_quantize
    from tileinfer_core.quantize_recipe import Recipe

    load_unquantised(source)
    text = read_text(how.calibrate) if how.calibrate else None
    recipe = Recipe(how.group_size, how.embedding.value if how.embedding else None)
    name, target = opening.open_store(settings).int8_target(source)
    if dest is not None:
        name, target = str(dest), expanded(dest).absolute()
        if not target.parent.is_dir():
            raise DiskError(f"{target.parent}: no such folder")
    return plan_quantize(source, target, name, recipe, calibration=text, kv=kv, force=force)


def make(
    cli: Cli,
    plan: QuantizePlan,
    how: QuantizeFlags,
    backend: str,
    *,
    half_copies: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Runs a plan and prints its receipt; one that is complete is only shown."""
    from tileinfer_core.quantize import execute_quantize
    from tileinfer_core.receipt import QualityOptions, read_receipt

    err, size = cli.streams.err, render.bytes_text
    if plan.complete:
        render.print_note(err, f"{plan.name} is complete: {plan.target}")
        receipt = read_receipt(plan.target) or {}
    else:
        if not quiet:
            what = f"{size(plan.bytes_before)} become {size(plan.bytes_after)} as INT8, {plan.recipe.name}"
            render.print_note(err, f"{plan.name}: {what}; {size(plan.free_bytes)} free in {plan.target.parent}")
        quality = QualityOptions(backend, how.eval_tokens, half_copies) if how.eval_tokens > 0 else None
        with render.Progress(err, lasting=True, quiet=quiet) as progress:
            receipt = execute_quantize(plan, quality, progress).as_dict()
    if as_json:
        render.print_json(cli.streams.out, {"model": plan.name, "path": str(plan.target), "receipt": receipt})
    elif receipt:
        print_receipt(cli.streams.out, receipt)
        if not quiet:
            render.print_note(err, f"use it: -m {plan.name}")
