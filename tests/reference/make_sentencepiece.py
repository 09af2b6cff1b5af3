"""Makes sentencepiece.json: a tiny SentencePiece BPE vocabulary and the ids SentencePiece gives to some texts.

Run by hand where `sentencepiece` is installed (0.2.3 made the stored file); the tests only read the result:

    python tests/reference/make_sentencepiece.py

Trained on a few files of Python's own standard library, with the options Llama 2's tokenizer has.
"""

from __future__ import annotations

import json
import random
import sysconfig
import tempfile
from pathlib import Path

import sentencepiece

FILES = ["argparse.py", "ast.py", "textwrap.py", "tarfile.py", "typing.py", "inspect.py", "difflib.py"]
TEXTS = [
    "", " ", "a", "Hello world", "  two  spaces   three", "tabs\tand\nnewlines\r\n\n", "def f(x):\n    return x + 1\n",
    "ééé naïve Zürich", "日本語のテキスト", "😀🧑🏽‍🚀 done", "1234567890 3.14", "aaaaaaaaaaaa", "====----====",
    "<s> is text </s>", "नमस्ते", "MiXeD CaSe_and_snake_case", "https://example.org/a?b=c&d=e", "   around   ",
]  # fmt: skip


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    stdlib = Path(sysconfig.get_path("stdlib"))
    lines = [line for name in FILES for line in (stdlib / name).read_text().splitlines() if line.strip()]
    (folder / "corpus.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), vocab_size=700, model_type="bpe",
        byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=True, unk_id=0, bos_id=1, eos_id=2, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    size = model.vocab_size()

    def kind(i: int) -> int:  # the numbers GGUF uses
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    texts = TEXTS + [line[:120] for line in random.Random(1).sample(lines, 40)]
    result = {
        "tokens": [model.id_to_piece(i) for i in range(size)],
        "scores": [model.get_score(i) for i in range(size)],
        "types": [kind(i) for i in range(size)],
        "cases": [[text, model.encode(text)] for text in texts],
    }
    (Path(__file__).parent / "sentencepiece.json").write_text(json.dumps(result, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
