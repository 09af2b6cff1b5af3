"""`tileinfer generate`: one prompt in, one answer out."""

from dataclasses import asdict

from tileinfer_cli import answer, opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import (
    JsonFlag,
    LogprobsFlag,
    ModelFlags,
    PromptArgument,
    PromptFlags,
    QuietFlag,
    SamplingFlags,
    StatsFlag,
    StopFlags,
    ThinkingFlags,
)
from tileinfer_cli.prompt import read_prompt

NAME = "generate"
SHORT = "answer one prompt and leave"
EXAMPLES = """
Examples:
  tileinfer generate "What is the capital of France?" --temperature 0
  tileinfer generate "Summarise this." < report.txt
  git diff | tileinfer generate "Write a commit message." -m qwen3:0.6b --no-think
  tileinfer generate --raw -f story.txt --max-tokens 100 --json
"""


def run(
    cli: Cli,
    prompt: PromptArgument = None,
    *,
    words: PromptFlags,
    where: ModelFlags,
    sampling: SamplingFlags,
    until: StopFlags,
    thinking: ThinkingFlags,
    as_json: JsonFlag = False,
    logprobs: LogprobsFlag = False,
    stats: StatsFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Answer one prompt and leave. The answer goes to stdout, everything else to stderr."""
    streams = cli.streams
    streams.out.require()
    opening.check_raw(words, thinking.think)
    opening.check_logprobs(as_json=as_json, logprobs=logprobs)
    text = read_prompt(streams, prompt, words.file)
    settings = opening.load_settings()
    folder = opening.find_model_to_run(cli, settings, where.model)
    options = opening.engine_options(where, settings)
    conversation = opening.conversation(settings, words, text)
    opening.refuse_long_prompt(folder, options, conversation, think=thinking.think)
    engine = opening.load_engine(cli, folder, options, quiet=quiet)
    opening.warn_of_no_switch(cli, engine, thinking.think)
    wanted = opening.wanted(engine.generation, settings, asdict(sampling), until, thinking)
    ids = engine.prompt_ids(conversation, think=thinking.think)
    view = answer.AnswerView(streams, show_thinking=opening.shows_thinking(streams, thinking), silent=as_json)
    finished = view.show(engine.generate(ids, wanted.request))
    if as_json:
        document = answer.as_document(engine, finished, wanted.sampling)
        if thinking.show_thinking:
            document["thinking"] = finished.thinking
        if logprobs:
            document["tokens"] = answer.token_list(engine, finished)
        render.print_json(streams.out, document)
    answer.print_ending(streams, finished, limit_origin=wanted.max_tokens.origin)
    if stats:
        render.print_note(streams.err, answer.stats_text(finished))
    elif not quiet and wanted.seed_was_drawn:
        render.print_note(streams.err, f"seed {finished.seed}")
