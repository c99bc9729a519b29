"""Reads the demo model's corpus: novels from Debian packages, and a seeded synthetic slice.

The corpus is a function of the installed packages and the seed. No text is shipped: the manifest
names each source with its package, version, path, sha256 and licence, so that another machine can
tell whether it reads the same.
"""

import dataclasses
import hashlib
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.lab.demo_model import records, tales

CHUNK_CHARACTERS = 6000
VALIDATION_ONE_IN = 20
TALE_CHARACTERS, RECORD_CHARACTERS = 1_150_000, 550_000
AUSTEN_NOVELS = (
    "sensesensibility",
    "prideprejudice",
    "mansfieldpark",
    "emma",
    "northangerabbey",
    "persuasion",
)
GUTENBERG_START = re.compile(r"\A.*?^\*\*\* ?START OF TH[^\n]*\n", re.M | re.S)
GUTENBERG_END = re.compile(r"^\*\*\* ?END OF TH.*\Z", re.M | re.S)
GUTENBERG_SMALL_PRINT = re.compile(
    r"^(?:The )?Project Gutenberg Etext of The Works.*?^\*END[^\n]*\n", re.M | re.S
)
PLAIN = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "_": None, "\ufeff": None}
)


@dataclasses.dataclass(frozen=True)
class Source:
    """One work: the Debian package that carries it, the file there, and how to read it."""

    work: str
    package: str
    path: str
    licence: str
    read: Callable[[Path], str]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Holds documents in reading order, split by a hash of their text.

    The `human` documents are those of the sources.
    """

    human_train: list[str]
    human_validation: list[str]
    synthetic_train: list[str]
    synthetic_validation: list[str]
    manifest: dict[str, object]


class MissingSource(RuntimeError):
    """Says that a package is not installed; the message is the command that installs it."""


def _read_austen(path: Path) -> str:
    program = "for (n in commandArgs(TRUE)) writeLines(enc2utf8(get(data(list=n, package='janeaustenr'))))"
    command = ["Rscript", "-e", program, *AUSTEN_NOVELS]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


def _read_gutenberg(path: Path) -> str:
    text = path.read_text("utf-8").replace("\r\n", "\n")
    return GUTENBERG_END.sub("", GUTENBERG_START.sub("", text))


def _read_poe(path: Path) -> str:
    text = path.read_text("latin-1").replace("\r\n", "\n")
    return GUTENBERG_SMALL_PRINT.sub("\n\n", text)


PUBLIC_DOMAIN = "public domain (Project Gutenberg text, its header and footer removed); package: "
SOURCES = (
    Source(
        "Jane Austen: six novels",
        "r-cran-janeaustenr",
        "/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        PUBLIC_DOMAIN + "MIT",
        _read_austen,
    ),
    Source(
        "Edgar Allan Poe: collected works",
        "liblingua-stem-perl",
        "/usr/share/doc/liblingua-stem-perl/examples/collected_works_poe.txt",
        PUBLIC_DOMAIN + "Artistic or GPL-1+",
        _read_poe,
    ),
    Source(
        "Herman Melville: Moby Dick",
        "golang-github-colinmarc-hdfs-dev",
        "/usr/share/gocode/src/github.com/colinmarc/hdfs/testdata/mobydick.txt",
        PUBLIC_DOMAIN + "Expat",
        _read_gutenberg,
    ),
    Source(
        "Arthur Conan Doyle: The Adventures of Sherlock Holmes",
        "golang-github-jdkato-prose-dev",
        "/usr/share/gocode/src/github.com/jdkato/prose/testdata/sherlock.txt",
        PUBLIC_DOMAIN + "Expat",
        _read_gutenberg,
    ),
)


def check_sources() -> None:
    """Raises MissingSource with one command that installs all that is missing."""
    missing = [source.package for source in SOURCES if not Path(source.path).exists()]
    if missing:
        raise MissingSource(
            "the corpus is not installed; run: sudo apt-get install " + " ".join(missing)
        )


def _paragraphs(text: str) -> Iterator[str]:
    """Yields paragraphs on one line each, in plain ASCII punctuation.

    Tables, notices and ornaments are left out.
    """
    for block in re.split(r"\n\s*\n", text.translate(PLAIN)):
        paragraph = " ".join(block.split())
        letters = sum(character.islower() for character in paragraph)
        if letters < 0.6 * len(paragraph) or re.search(r"gutenberg|\be-?texts?\b", paragraph, re.I):
            continue
        if re.match(r"chapter\b.{0,40}$", paragraph, re.I):
            continue
        yield paragraph


def _chunks(paragraphs: Iterator[str]) -> Iterator[str]:
    """Yields documents of whole paragraphs, each near CHUNK_CHARACTERS long."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) >= CHUNK_CHARACTERS:
            yield "\n\n".join(held)
            held = []
    if held:
        yield "\n\n".join(held)


def _synthetic(make: Callable[[random.Random], str], characters: int, seed: str) -> Iterator[str]:
    rng, written = random.Random(seed), 0
    while written < characters:
        document = make(rng)
        written += len(document)
        yield document


def _is_held_out(document: str) -> bool:
    return (
        int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % VALIDATION_ONE_IN
        == 0
    )


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Returns training and validation documents.

    The same text is always on the same side, so repeats cannot leak across.
    """
    return [d for d in documents if not _is_held_out(d)], [d for d in documents if _is_held_out(d)]


def _package_version(package: str) -> str:
    command = ["dpkg-query", "-W", "-f", "${Version}", package]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read_source(source: Source) -> tuple[list[str], dict[str, object]]:
    path = Path(source.path)
    documents = list(_chunks(_paragraphs(source.read(path))))
    used = "\n\n".join(documents).encode()
    entry = {
        "work": source.work,
        "debian_package": source.package,
        "version": _package_version(source.package),
        "path": source.path,
        "file_bytes": path.stat().st_size,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "used_bytes": len(used),
        "used_sha256": hashlib.sha256(used).hexdigest(),
        "licence": source.licence,
    }
    return documents, entry


def build_corpus(seed: int) -> Corpus:
    """Reads every source, generates the synthetic slice, and splits both."""
    check_sources()
    human: list[str] = []
    entries: list[dict[str, object]] = []
    for source in SOURCES:
        documents, entry = _read_source(source)
        human += documents
        entries.append(entry)
    synthetic: list[str] = []
    for name, make, characters in (
        ("fairy tales from a grammar (tools/lab/demo_model/tales.py)", tales.tale, TALE_CHARACTERS),
        (
            "JSON, logs, sums, quotations (tools/lab/demo_model/records.py)",
            records.record,
            RECORD_CHARACTERS,
        ),
    ):
        documents = list(_synthetic(make, characters, f"{seed}/{name}"))
        synthetic += documents
        used = "\n\n".join(documents).encode()
        entries.append(
            {
                "work": name,
                "synthetic": True,
                "seed": seed,
                "used_bytes": len(used),
                "used_sha256": hashlib.sha256(used).hexdigest(),
                "licence": "Apache-2.0",
            }
        )
    manifest: dict[str, object] = {
        "held_out": f"documents whose sha256 is 0 modulo {VALIDATION_ONE_IN}",
        "sources": entries,
    }
    return Corpus(*_split(human), *_split(synthetic), manifest)
