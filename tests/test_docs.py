"""The documentation: its site builds without a warning, and the commands of the tutorials run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="jaxpage[docs] is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "LLM.generate" in (tmp_path / "reference" / "python.html").read_text()


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_run(tutorial: Path, tmp_path: Path) -> None:
    parts = []
    for place, (language, text) in enumerate(BLOCK.findall(tutorial.read_text(encoding="utf-8"))):
        if language == "python":
            (tmp_path / f"block{place}.py").write_text(text)
            text = f"python block{place}.py\n"
        parts.append(text)
    assert parts
    if "smollm2" in "".join(parts) and os.environ.get("NO_INDEX"):
        pytest.skip("the package index is not wanted")
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "".join(parts)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAXPAGE_SOURCE": str(ROOT), "JAX_PLATFORMS": "cpu"}
