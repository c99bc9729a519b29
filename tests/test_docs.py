"""The documentation: its site builds without a warning, its commands have flags that exist, and
those of the tutorials run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpage import SamplingParams
from jaxpage.cli.parsers import make_parser
from jaxpage.step.plan import StepPlan, StepResult
from tests.support.browsing import CHROMIUM, launched
from tests.support.engines import BLOCKS_OF_4, make_llm

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOUSE_PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "jaxpage/demo/README.md",
    "jaxpage/demo/DRAFTERS.md",
)
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<< *'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)


@pytest.mark.sweep  # it takes half a minute: .ci/run runs it by itself
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="jaxpage[docs] is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "LLM.generate" in (tmp_path / "reference" / "python.html").read_text()
    if CHROMIUM.exists():
        look_at_site(tmp_path)


def look_at_site(site: Path) -> None:
    """Checks what a reader sees: guides first in a search, no table that scrolls, the picture of
    the theme.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="jaxpage[test] has it")
    with launched(playwright) as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
        for word in ("preemption", "speculation", "cache"):
            page.goto(f"file://{site}/search.html?q={word}")
            # Results are listed one after the other; decisions come after all guides.
            page.wait_for_selector("ul.search a[href^='decisions/']")
            links = page.locator("ul.search li > a").evaluate_all("all => all.map(one => one.href)")
            rooms = [link.removeprefix(f"file://{site}/").partition("/")[0] for link in links]
            assert rooms[0] in ("guides", "tutorials"), (word, links[:3])
            last_guide = max(index for index, room in enumerate(rooms) if room == "guides")
            assert last_guide < rooms.index("decisions"), word
        too_wide = (
            "[...document.querySelectorAll('.table-wrapper')].filter(one => one.scrollWidth > "
            "one.clientWidth + 1).length"
        )
        for path in sorted(site.rglob("*.html")):
            if "table-wrapper" in path.read_text():
                page.goto(f"file://{path}")
                assert page.evaluate(too_wide) == 0, f"a table of {path.name} scrolls"
        page.goto(f"file://{site}/index.html")
        visible = page.locator("article img").evaluate_all(
            "all => all.filter(one => one.checkVisibility()).map(one => one.src)"
        )
        assert [Path(source).name for source in visible] == ["page-dark.png"]
        page.close()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_have_flags_that_exist(path, capsys):
    """Whole commands in blocks; in the text those that leave something out are fine."""
    text, parser = path.read_text(encoding="utf-8"), make_parser()
    spans = re.findall(r"`(jaxpage [^`]*)`", FENCE.sub("", text))
    wrong = []
    for source, whole in [(block, True) for block in shell_blocks(text)] + [
        (span, False) for span in spans
    ]:
        for words in jaxpage_commands(source):
            try:
                parser.parse_args(words)
            except SystemExit as end:
                message = capsys.readouterr().err.rpartition("error: ")[2].strip()
                if end.code and (whole or re.search("unknown|unexpected|invalid choice", message)):
                    wrong.append(f"jaxpage {shlex.join(words)}: {message}")
    assert not wrong, "\n".join(wrong)


def test_links_are_called_by_what_they_lead_to():
    """No link to a page has the page's file for a text.

    A link to a file that is no page may have its path.
    """
    problems = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in [*PAGES, *(ROOT / name for name in HOUSE_PAGES)]
        for link in links_called_by_files(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)
    planted = "[a.md](a.md) [`x/y.md`](../x/y.md#z) [docs/](docs/README.md) [a page](a.md) [x.py](x.py) [lab\nlog.md](b.md)"
    assert list(links_called_by_files(planted)) == [
        "[a.md](a.md)",
        "[`x/y.md`](../x/y.md#z)",
        "[docs/](docs/README.md)",
        "[lab\nlog.md](b.md)",
    ]


def test_the_recipes_name_what_is_there():
    """Each "`NAME` of `file`" of CONTRIBUTING.md is a name that the file defines."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    folders = ("jaxpage", "pallas_kernels", "tests", "tools")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pairs = re.findall(r"(?:`(\w+)` (?:and|or) )?`(\w+)` (?:of|in) `([\w/]+\.py)`", text)
    wrong = [
        f"`{name}` of `{file}`"
        for *names, file in pairs
        for name in filter(None, names)
        if not any(
            re.search(rf"^ *(class |def )?{name}\b *[:=(]", path.read_text(), re.MULTILINE)
            for path in sources
            if path.as_posix().endswith(f"/{file}")
        )
    ]
    assert len(pairs) > 20 and not wrong, wrong


def links_called_by_files(text: str) -> Iterator[str]:
    for link in re.finditer(r"\[([^\]]*)\]\([^)\s]*\.md(?:#[^)]*)?\)", text):
        if re.search(r"(\.md|/)`?$", link[1]):
            yield link[0]


def test_the_example_of_the_architecture_is_what_the_engine_does(monkeypatch):
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    steps: list[tuple[StepPlan, StepResult]] = []
    with make_llm("demo", **BLOCKS_OF_4, dtype="float32") as llm:
        run = llm._engine.runner.run

        def record(batch: Any) -> StepResult:
            steps.append((plans[-1], run(batch)))
            return steps[-1][1]

        plans: list[StepPlan] = []
        build = llm._engine.builder.build
        monkeypatch.setattr(
            llm._engine.builder,
            "build",
            lambda plan, *others: (plans.append(plan), build(plan, *others))[1],
        )
        monkeypatch.setattr(llm._engine.runner, "run", record)
        params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=3)
        llm.generate("Once upon a time there lived", params, use_tqdm=False)
    table = page.partition("step  rows")[2].partition("```")[0]
    for plan, result in steps:
        for row in plan.rows:
            assert (
                f"{row.sequence_id}: {row.start}, {row.token_ids}, {row.block_tables[0]}" in table
            )
        for source, target in plan.copies:
            assert f"{source} to {target}" in table
        assert " ".join(map(str, result.token_ids.tolist())) in table
    assert len(steps) == 4


def test_commands_are_found_in_shell():
    page = """```{eval-rst}
jaxpage no
```
```
$ A=1 srun -n 2 jaxpage serve x \\
        --port 1 2>err.txt > out.txt &
    cat <<'END'
    jaxpage no
END
    echo 'jaxpage no' | FOO="b c" jaxpage generate "a | b" && (jaxpage doctor) # jaxpage no
```"""
    (script,) = shell_blocks(page)
    assert list(jaxpage_commands(script)) == [
        ["serve", "x", "--port", "1"],
        ["generate", "a | b"],
        ["doctor"],
    ]


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_run(tutorial, tmp_path):
    """They run as a reader types them: the environment has jaxpage, and what the tutorial installs
    into it.
    """
    if os.environ.get("NO_INDEX"):
        pytest.skip("the package index is not wanted")
    venv.create(tmp_path / "env", with_pip=True)
    bare = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    bare["PATH"] = f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"
    subprocess.run(["pip", "install", "--quiet", ROOT], env=bare, check=True)
    parts = []
    for index, (language, text) in enumerate(BLOCK.findall(tutorial.read_text(encoding="utf-8"))):
        if language == "python":
            (tmp_path / f"block{index}.py").write_text(text)
            text = f"python block{index}.py\n"
        parts.append(text)
    assert parts
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "".join(parts)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def shell_blocks(page: str) -> list[str]:
    return [body for language, body in FENCE.findall(page) if language in ("", "bash")]


def jaxpage_commands(script: str) -> Iterator[list[str]]:
    """Yields the words after `jaxpage` of each such command in lines of shell.

    Prompts, assignments and redirections are left out.
    """
    for line in HEREDOC.sub("", script).replace("\\\n", " ").splitlines():
        if "jaxpage" not in line:
            continue  # the output of a command may have any quotes
        lexer = shlex.shlex(
            re.sub(r"\d*[<>]+&? *[^\s(]+", "", line), posix=True, punctuation_chars=True
        )
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();<>|&"):
                words.append(word)
            else:
                if "jaxpage" in words:
                    yield words[words.index("jaxpage") + 1 :]
                words = []


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "JAXPAGE_SOURCE": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }


def test_tests_that_documents_name_are_there():
    """A name that ends in dots is the beginning of one; a name alone is of the file before it."""
    named = re.compile(r"`(?:tests/)?((?:lab/)?test_\w+\.py)?(?:::(\w+)(\.\.\.)?)?`")
    missing = []
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        if "lab-log" in page.name or page.name == "README.md":
            continue  # a log is of its day, and an example is none
        code = ""
        for file, test, dots in named.findall(page.read_text()):
            if file:
                path = ROOT / "tests" / file
                code = path.read_text() if path.is_file() else ""
            ending = "" if dots else r"\b"
            if test and not re.search(rf"(def|class) {test}{ending}", code):
                missing.append(f"{page.relative_to(ROOT)}: {file}::{test}")
    assert not missing
