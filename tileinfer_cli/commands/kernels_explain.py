"""`tileinfer kernels explain`: which forms of a kernel are compiled, and what makes them distinct."""

from typing import TYPE_CHECKING, Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ArchToLookAtOption, CompilerFlags, JsonFlag, ShapeOption

if TYPE_CHECKING:
    from tileinfer_core.kernel_explain import ExplainedKernel, Explanation

NAME = "explain"
SHORT = "why a kernel is compiled, and how often"
EXAMPLES = """
Examples:
  tileinfer kernels explain rms_norm -m Qwen3-4B --arch sm_90
  tileinfer kernels explain rms_norm --arch sm_90 --launch "x=float32[511,1024] y=bfloat16[511,1024]"
"""


def run(
    cli: Cli,
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="A kernel's name; `kernels list` has them.")],
    *,
    launch: Annotated[
        list[str] | None,
        typer.Option(
            "--launch",
            metavar="ARGS",
            help="A launch, as changes to form 1: NAME=TYPE[LENGTHS]@OFFSET:(STRIDES) or NAME=NUMBER; may be repeated.",
        ),
    ] = None,
    arch: ArchToLookAtOption = None,
    model: ShapeOption = None,
    compiler: CompilerFlags,
    as_json: JsonFlag = False,
) -> None:
    """List the forms that a kernel is compiled in, with what tells each from the form that is most like it.

    A form is one combination of types, ranks, alignments, divisibilities, constants and hints.
    """
    settings = opening.load_settings()
    opening.set_compiler(compiler, settings)
    from tileinfer_core import kernel_tools
    from tileinfer_core.kernel_explain import explain_kernel

    models = kernel_tools.chosen_models(model or (), opening.open_store(settings))
    archs = kernel_tools.chosen_archs(arch or [kernel_tools.this_gpu() or "sm_90"])
    found = [explain_kernel(kernel, target, models, launch or ()) for target in archs]
    if as_json:
        render.print_json(cli.streams.out, [explanation.as_dict() for explanation in found])
        return
    for explanation in found:
        _print(cli, explanation)


def _print(cli: Cli, found: "Explanation") -> None:
    out = cli.streams.out
    render.print_heading(out, f"{found.kernel}({', '.join(found.arguments)}), {found.arch}")
    out.write(f"{found.formula}\n")
    for form in found.specialisations:
        out.write(f"\n{form.number}  {'kept' if form.kept else 'not compiled yet'}, {form.parameters} parameters, ")
        out.write(f"for {', '.join(form.models[:3])}{' …' if len(form.models) > 3 else ''}\n   {form.symbol}\n")
        if form.against is None:
            render.print_pairs(out, _traits(form), indent="   ")
        else:
            out.write("".join(f"   not {form.against}: {text}\n" for text in form.differs))
    for asked in found.launches:
        kept = "kept" if asked.kept else "would be compiled"
        out.write(f"\n{asked.asked}\n   {f'form {asked.same_as}' if asked.same_as else f'a new form, {kept}'}\n")
        out.write("".join(f"   not {asked.against}: {text}\n" for text in asked.differs))
    for symbol in found.others:
        out.write(f"\nin the cache, for none of these models: {symbol}\n")


def _traits(form: "ExplainedKernel") -> list[tuple[str, str, None]]:
    hints = ", ".join(f"{name} {value}" for name, value in form.hints.items()) or "none"
    return [(t["parameter"], f"{t['what']}: {t['value']}", None) for t in form.traits] + [("hints", hints, None)]
