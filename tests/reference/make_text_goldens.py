"""Writes small tokenizers and what Transformers makes of texts and chats with them.

Not run by the tests. Needs transformers and torch (CPU):

    python tests/reference/make_text_goldens.py [DEMO.gguf]

It writes tests/fixtures/tokenizers/*/ (byte-level BPE with the pre-tokenizers of the model families, and two kinds of
SentencePiece, all trained on the corpus below), text_goldens.json and sampling_goldens.json beside itself, and, given
the demo model's GGUF file, demo_text_goldens.json as Transformers reads that file.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
DATE = dt.datetime(2026, 2, 3, 4, 5, 6)  # what Transformers compares is the local clock

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 'we'll', I'M, they'D, you've; don't can't.",
    "if a != b : c .  n't do 's ' m ? ! ,",
    "def f(x: int) -> str:\n\tif x >= 10:\r\n        return f\"{x:,}\"  # über\n\n\n    return '\\n\\t\\\\d'\n",
    '#include <stdio.h>\nint main(void){printf("%d\\n",a[0]);/* */return 0;}//',
    "  leading, trailing   \n \n\t\t\n   \u00a0\u2003mixed\u3000spaces \r\n\r\n end ",
    "1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ १२३ ½ Ⅷ 2²",
    "你好,世界。こんにちは、ｶﾀｶﾅ 안녕하세요 繁體中文",
    "नमस्ते दुनिया, ไทยแลนด์, العربية שלום",
    "🧑🏽‍🚀 👨‍👩‍👧‍👦 🇨🇭 ❤️ 😀😃",
    "e\u0301 é A\u030a Å ﬁ ① Ｆｕｌｌ ｗｉｄｔｈ \u1e9b\u0323",
    "Zürich naïve façade coöperate Ĳssel Straße ΑΒΓ αβγ Привет",
    "\u200bzero\u200d width\ufeff \u2028 \u0085 \x7f \x01",
    "[/INST] arr[0] [bold]x :smile: <b>&amp;</b> <0x0A> ▁ ▁▁ Ġ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ---------- ======== ........ !!!",
    "",
    " ",
    "\n",
    "x",
]
TRAINING = [
    *CORPUS,
    "The model reads the prompt and writes the answer, one token after another; the user waits for the first one.",
    "What is the capital of France? The capital of France is Paris. You are a helpful assistant.",
    "system user assistant tool im start end think <|im_ |> header id im_end im_start INST",
    "import numpy as np\nfor index in range(len(values)):\n    total += values[index]\n",
]

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATS = {
    "one turn": [("user", "What is 12345 + 1?")],
    "system": [("system", "Answer in  German.\n"), ("user", " Hello\r\n  there ")],
    "empty system": [("system", ""), ("user", "Hi")],
    "three turns": [
        ("user", "你好 🧑🏽‍🚀"),
        ("assistant", "Hello!", "The user greets.\nIn Chinese."),
        ("user", "regex \\n\\t\\\\d 'q' \"w\""),
        ("assistant", "\n\nDone.\n", "\nhm\n"),
        ("user", "and    now?"),
    ],
    "thinking in the content": [
        ("user", "a"),
        ("assistant", "<think>\nold thought\n</think>\n\nold answer"),
        ("user", "b"),
    ],
    "tools": [("user", "weather?"), ("tool", '{"t": "21 °C", "a": "<b>"}'), ("tool", "line\n2")],
    "five turns": [
        ("system", "Count."),
        ("user", "one"),
        ("assistant", "1", ""),
        ("user", "two?"),
        ("assistant", " 2 ", "after 1"),
        ("user", "3"),
        ("assistant", "three\n\n\n3"),
        ("user", "vier"),
        ("assistant", "4", "German now"),
        ("user", "fünf!"),
    ],
    "odd contents": [
        ("user", ""),
        ("assistant", ""),
        ("user", " \n\t "),
        ("assistant", "{{ bos_token }} {% raw %} <|inner_prefix|>y<|inner_suffix|>"),
        ("user", "<|im_end|>\n<|assistant_end|></s>[/INST]<|eot_id|> \u200b\ufeff\r\n"),
    ],
    "no question": [("assistant", "I begin.")],
    "command": [("system", "Be brief. /no_think "), ("user", "one\ntwo\nthree")],
}


def byte_level(pre: list, *, normalizer=None, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre[0] if len(pre) == 1 else pre_tokenizers.Sequence(pre)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet))
    return tokenizer


def split(pattern: str) -> list:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def qwen() -> tuple[Tokenizer, dict]:
    tokenizer = byte_level(split(QWEN), normalizer=normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<tool_response>", "</tool_response>", "<think>", "</think>")]
    )
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}


def llama3() -> tuple[Tokenizer, dict]:
    tokenizer = byte_level(split(LLAMA3), ignore_merges=True)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(names)
    bos = tokenizer.token_to_id(names[0])
    template = processors.TemplateProcessing(f"{names[0]} $A", None, [(names[0], bos)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer, {"bos_token": names[0], "eos_token": "<|eot_id|>"}


def smollm_pre_tokenizer():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def smollm() -> tuple[Tokenizer, dict]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = smollm_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]  # in the vocabulary itself, from id 0
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=names)
    tokenizer.train_from_iterator(TRAINING, trainer)
    config = {"bos_token": names[1], "eos_token": names[2], "unk_token": names[0], "clean_up_tokenization_spaces": True}
    return tokenizer, config


def gpt2() -> tuple[Tokenizer, dict]:
    tokenizer = byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("   ", normalized=False), AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer, {"eos_token": "<|end|>", "add_bos_token": True, "bos_token": "<|start|>", "add_eos_token": True}


def tekken() -> tuple[Tokenizer, dict]:
    tokenizer = byte_level(split(TEKKEN))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}


APERTUS_CONTROLS = [
    *(f"<|{role}_{end}|>" for role in ("system", "developer", "user", "assistant") for end in ("start", "end")),
    *(f"<|{block}_{end}|>" for block in ("inner", "tools") for end in ("prefix", "suffix")),
]


def apertus() -> tuple[Tokenizer, dict]:
    """Tekken's pre-tokenizer; its own control tokens; whole words are taken from the vocabulary before merging."""
    tokenizer = byte_level(split(TEKKEN), ignore_merges=True)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>", "<SPECIAL_4>", *APERTUS_CONTROLS])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    names = {"bos_token": "<s>", "eos_token": "<|assistant_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, names


def sentencepiece_model() -> models.BPE:
    """A BPE over ▁-words with the 256 byte tokens, as SentencePiece makes it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    texts = [text for text in TRAINING if text.isascii()]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300))
    table = json.loads(trained.to_str())["model"]
    words = sorted(table["vocab"], key=table["vocab"].get)
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(merge) for merge in table["merges"]]
    ids = {word: index for index, word in enumerate(vocab)}
    return models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def sentencepiece() -> tuple[Tokenizer, dict]:
    tokenizer = Tokenizer(sentencepiece_model())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("[INST]", special=False), AddedToken("<word>", single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def metaspace() -> tuple[Tokenizer, dict]:
    tokenizer = Tokenizer(sentencepiece_model())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    flags = {"<|left|>": {"lstrip": True}, "<|right|>": {"rstrip": True}, "<|both|>": {"lstrip": True, "rstrip": True}}
    tokenizer.add_tokens([AddedToken(text, normalized=True, **flag) for text, flag in flags.items()])
    tokenizer.add_tokens([AddedToken("<word>", single_word=True), AddedToken("[INST]", special=True, normalized=False)])
    return tokenizer, {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


FAMILIES = {
    "apertus": (apertus, ["deliberation"]),
    "qwen": (qwen, ["reasoning", "default_system"]),
    "llama3": (llama3, ["dated"]),
    "smollm": (smollm, ["chatml"]),
    "gpt2": (gpt2, ["macros"]),
    "tekken": (tekken, ["strict", "bracketed"]),
    "sentencepiece": (sentencepiece, ["strict"]),
    "metaspace": (metaspace, ["strict"]),
}
SCAFFOLDS = [
    "{0}user\nHello  {1}\n{0}assistant",
    "a{0}b {1} c  {0}{1}{0} {1}\n{0}x_{1}y",
    " {0} word{1}_ {1}, <{0}|{1}>  \n\n{0} \t {1} end",
    "{1}{0}",
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": 'größer & "kleiner" <b>', "parameters": {}}},
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds things.\nIn order.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "description": "a name", "enum": ["a", "b"]},
                    "limits": {"type": "array", "items": {"type": "integer"}, "default": 3},
                    "where": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": ["x"]},
                },
                "required": ["what"],
            },
        },
    },
]


class FixedClock(dt.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


def messages(chat: list[tuple]) -> list[dict]:
    keys = ("role", "content", "reasoning_content")
    return [dict(zip(keys, turn, strict=False)) for turn in chat]


def rendered(tokenizer, chat: list[tuple], **options) -> dict | None:
    """Text and ids, or None where the template refuses the chat."""
    try:
        text = tokenizer.apply_chat_template(messages(chat), tokenize=False, **options)
        ids = tokenizer.apply_chat_template(messages(chat), tokenize=True, return_dict=False, **options)
    except Exception as error:  # the template's own words
        return {"refused": str(error)}
    return {"text": text, "ids": ids}


def chats(tokenizer) -> list[dict]:
    rows = []
    for name, chat in CHATS.items():
        for prompt, think, tools in [(True, None, None), (True, False, None), (False, True, None), (True, None, TOOLS)]:
            options = {"add_generation_prompt": prompt}
            options |= {} if think is None else {"enable_thinking": think, "thinking": think}
            options |= {} if tools is None else {"tools": tools}
            row = {"chat": name, "prompt": prompt, "think": think, "tools": tools is not None}
            rows.append(row | rendered(tokenizer, chat, **options))
    return rows


def family(name: str) -> dict:
    make, templates = FAMILIES[name]
    folder = FIXTURES / "tokenizers" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer, config = make()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
    return {"templates": {t: goldens(folder, t) for t in templates}, **texts(folder)}


def texts(folder: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    pairs = list(zip(added, added[1:] + added[:1], strict=True))
    scaffolds = [scaffold.format(*pair) for scaffold in SCAFFOLDS for pair in pairs]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in CORPUS]
    return {
        "rows": len(tokenizer),
        "corpus": plain,
        "corpus_with_own_rule": [tokenizer.encode(text) for text in CORPUS],
        "decoded": [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in plain],
        "scaffolds": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in scaffolds],
        "scaffolds_decoded": [
            tokenizer.decode(
                tokenizer.encode(text, add_special_tokens=False),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            for text in scaffolds
        ],
    }


def goldens(folder: Path, template: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy)
        shutil.copy(FIXTURES / "templates" / f"{template}.jinja", copy / "chat_template.jinja")
        return chats(AutoTokenizer.from_pretrained(copy))


def sampling() -> list[dict]:
    import torch
    from transformers.generation import logits_process as lp

    torch.manual_seed(0)
    rows = []
    settings = [
        {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 1.3},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
        {"temperature": 0.2, "top_k": 1}, {"top_p": 0.01}, {"top_k": 40, "top_p": 0.5},
    ]  # fmt: skip
    for setting in settings:
        logits = torch.randn(1, 40) * 3
        history = torch.randint(0, 40, (1, 12))
        scores = logits.double()
        if penalty := setting.get("repetition_penalty"):
            scores = lp.RepetitionPenaltyLogitsProcessor(penalty)(history, scores)
        scores = lp.TemperatureLogitsWarper(setting.get("temperature", 1.0))(history, scores)
        if "top_k" in setting:
            scores = lp.TopKLogitsWarper(setting["top_k"])(history, scores)
        if "top_p" in setting:
            scores = lp.TopPLogitsWarper(setting["top_p"])(history, scores)
        if "min_p" in setting:
            scores = lp.MinPLogitsWarper(setting["min_p"])(history, scores)
        rows.append({"settings": setting, "logits": logits[0].tolist(), "history": history[0].tolist(),
                     "probs": torch.softmax(scores, -1)[0].tolist()})  # fmt: skip
    return rows


def demo(gguf: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Transformers doesn't read the pre-tokenizer's name ("smollm") from the file and leaves out the splitting of
    # digits that SmolLM2's own tokenizer.json has.
    tokenizer.backend_tokenizer.pre_tokenizer = smollm_pre_tokenizer()
    return {
        "corpus": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in TRAINING],
        "chats": chats(tokenizer),
        "eos_token": tokenizer.eos_token,
    }


def write(name: str, value: object) -> None:
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def main() -> None:
    chat_template_utils.datetime = FixedClock
    write("text_goldens.json", {
        "corpus": CORPUS, "chats": CHATS, "tools": TOOLS, "date": DATE.isoformat(),
        "families": {name: family(name) for name in FAMILIES},
    })  # fmt: skip
    write("sampling_goldens.json", sampling())
    if len(sys.argv) > 1:
        write("demo_text_goldens.json", demo(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
