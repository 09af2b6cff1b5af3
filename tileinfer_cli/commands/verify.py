"""`tileinfer verify`: are the files of a model still the ones that were fetched?"""

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelArgument, QuietFlag
from tileinfer_core.errors import DamagedModelError

NAME = "verify"
SHORT = "check a model's files against their checksums"
EXAMPLES = """
Examples:
  tileinfer verify demo
"""


def run(cli: Cli, model: ModelArgument, *, as_json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Check every file of a model against its recorded size and SHA-256. Damage ends with exit code 7."""
    store = opening.open_store(opening.load_settings())
    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        findings = store.verify(model, progress)
    if as_json:
        render.print_json(cli.streams.out, [opening.plain(finding) for finding in findings])
    else:
        render.print_findings(cli.streams.out, findings)
    bad = [finding for finding in findings if finding.status == "problem"]
    if bad:
        raise DamagedModelError(f"{model}: {len(bad)} of {len(findings)} checks failed", hint=bad[0].cure)
