"""The demo model against a second implementation that read the same GGUF (reference/make_demo_golden.py).

TileInfer keeps the dequantised weights as float16, the reference as float32; that moves logits by about 1e-3. A greedy
token that led by less than NEAR_TIE is where a comparison has to stop.
"""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

from tileinfer_core.engine import Engine, Request
from tileinfer_core.evaluate import perplexity
from tileinfer_core.messages import Message
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.store import Store

pytestmark = pytest.mark.demo

REFERENCE = Path(__file__).parents[1] / "reference"
GOLDEN = json.loads((REFERENCE / "demo_golden.json").read_text())
NEAR_TIE = 5e-3


@pytest.fixture(scope="module")
def engine(demo_home: Path) -> Engine:
    return Engine.load(Store(demo_home).resolve("demo"))


@pytest.mark.parametrize("golden", GOLDEN["prompts"], ids=lambda golden: golden.get("chat", golden.get("raw"))[:20])
def test_prompt_and_greedy_tokens_are_the_reference_s(engine, golden):
    prompt = engine.prompt_ids([Message("user", golden["chat"])] if "chat" in golden else golden["raw"])
    assert list(prompt) == golden["ids"]
    request = Request(SamplingParams(temperature=0.0), max_tokens=len(golden["greedy"]))
    tally, events = engine.start(prompt, request, engine.new_cache())
    finished = list(events)[-1]
    clear = len(list(takewhile(lambda lead: lead >= NEAR_TIE, golden["leads"])))
    assert clear >= min(50, len(golden["greedy"]))
    assert tally.output_ids[:clear] == golden["greedy"][:clear]
    if clear == len(golden["greedy"]):
        assert finished.text == golden["text"]


def test_perplexity_is_the_reference_s(engine):
    text = (REFERENCE / "perplexity.txt").read_text()
    assert engine.tokenizer.encode(text, special=False) == GOLDEN["perplexity"]["ids"]
    result = perplexity(engine, text)
    assert result.tokens == len(GOLDEN["perplexity"]["ids"]) - 1
    assert result.nll == pytest.approx(GOLDEN["perplexity"]["nll"], abs=1e-3)
