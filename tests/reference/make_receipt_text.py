"""Makes tileinfer_core/data/receipt_text.txt.gz: the text that a quantised model's receipt is measured on.

It is prose of SQLite's documentation, which its authors have put into the public domain
(https://www.sqlite.org/copyright.html), taken from the Debian package sqlite3-doc 3.40.1:

    apt-get download sqlite3-doc && dpkg-deb -x sqlite3-doc_*.deb x
    python tests/reference/make_receipt_text.py x/usr/share/doc/sqlite3 tileinfer_core/data/receipt_text.txt.gz

`--rest` writes the prose of other pages instead, for calibration: no page is in both.
"""

from __future__ import annotations

import gzip
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

PAGES = (
    "atomiccommit", "howtocorrupt", "queryplanner-ng", "testing", "malloc", "whentouse", "isolation", "wal",
)  # fmt: skip
REST = (
    "optoverview", "queryplanner", "lockingv3", "tempfiles", "quirks", "whyc", "foreignkeys", "rtree", "vdbe",
    "aff_short", "transactional",
    "security", "sharedcache", "asyncvfs", "unlock_notify", "threadsafe", "inmemorydb", "limits",
)  # fmt: skip
BLOCKS = {"p", "li", "h1", "h2", "h3", "blockquote", "td", "dd", "div", "ul", "ol", "table", "tr", "dl", "dt"}
SKIPPED = {"script", "style", "pre", "svg", "title", "head", "th"}


class Prose(HTMLParser):
    """The paragraphs of a page: running text of a sentence or more. Code, tables of numbers and menus are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._text: list[str] = []
        self._skipping = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._skipping += tag in SKIPPED
        if tag in BLOCKS:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= tag in SKIPPED
        if tag in BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if self._skipping <= 0:
            self._text.append(data)

    def flush(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._text)).strip()
        self._text = []
        sentence = len(text) >= 80 and text[-1] in ".:?!)" and text[0].isalnum()
        if sentence and sum(c.isalpha() or c == " " for c in text) > 0.9 * len(text):
            self.paragraphs.append(text)


def prose(path: Path) -> str:
    parser = Prose()
    parser.feed(path.read_text("utf-8", "replace"))
    parser.flush()
    return "\n\n".join(parser.paragraphs)


def main() -> None:
    pages = REST if "--rest" in sys.argv else PAGES
    source, target = [Path(name) for name in sys.argv[1:] if not name.startswith("--")]
    text = "\n\n".join(prose(source / f"{page}.html") for page in pages) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    target.write_bytes(gzip.compress(data, 9, mtime=0) if target.suffix == ".gz" else data)
    print(f"{target}: {len(data):,} bytes of text, {target.stat().st_size:,} on disk")


if __name__ == "__main__":
    main()
