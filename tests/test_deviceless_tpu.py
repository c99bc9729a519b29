"""Steps compiled for TPUs that are not there, by libtpu; skipped where it is not installed.

`tools/inspect_tpu.py` compiles all kinds of step of three models, in `.ci/nightly`.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpage.device.hardware.backends import Backend
from tests.support.notebooks import executed
from tools import inspect_tpu
from tools.lab.kernel_lab.inspection import deviceless_tpu
from tools.lab.kernel_lab.inspection.deviceless_tpu import (
    compile_for_tpu,
    inspect_for_tpu,
    unavailable,
)
from tools.step_shapes import BUCKETS, ON_TPU, StepShapes, step_shapes

ROOT = Path(__file__).parents[1]
needs_libtpu = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def shapes(backend: Backend, **changes: int) -> StepShapes:
    """Returns the shapes of a decode of one layer of the demo."""
    config = {**inspect_tpu.DEMO, **changes}
    return step_shapes(
        BUCKETS["decode"], backend=backend, config=config, num_layers=1, num_blocks=16384
    )


def problems(step: StepShapes) -> list[str]:
    findings = inspect_for_tpu(compile_for_tpu(step.step, *step.arguments))
    return findings.problems(pages_bytes=step.pages_bytes, array_bytes=step.array_bytes)


@needs_libtpu
def test_a_step_on_a_tpu_changes_its_pages_in_place_by_the_kernel_of_jax() -> None:
    step = shapes(ON_TPU)
    findings = inspect_for_tpu(compile_for_tpu(step.step, *step.arguments))
    assert dict(findings.calls) == {"ragged_paged_attention_kernel": 1}
    assert findings.problems(pages_bytes=step.pages_bytes, array_bytes=step.array_bytes) == []


@needs_libtpu
@pytest.mark.sweep
def test_pages_of_narrow_heads_would_be_copied_and_the_host_would_be_seen() -> None:
    """A TPU does not keep separate pages of heads 64 wide as they are, and the checks see it."""
    assert any("(copy)" in problem for problem in problems(shapes(Backend("scan"))))

    def asks_the_host(x: jax.Array) -> jax.Array:
        jax.debug.callback(print, x.sum())
        return x + 1

    findings = inspect_for_tpu(
        compile_for_tpu(jax.jit(asks_the_host), jax.ShapeDtypeStruct((8, 128), jnp.float32))
    )
    assert findings.of_host


def test_without_libtpu_the_command_that_brings_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "libtpu is not installed: pip install 'jaxpage[tpu]'"
    monkeypatch.setattr(deviceless_tpu, "libtpu_reason", lambda: text)
    with pytest.raises(RuntimeError, match="nothing can be compiled for v6e: libtpu"):
        compile_for_tpu(jax.jit(lambda x: x), jnp.zeros(3), tpu="v6e")
    with pytest.raises(SystemExit):
        inspect_tpu.main(["--print"])
    assert text in capsys.readouterr().err


def test_the_table_is_put_between_its_marks(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect_tpu, "unavailable", lambda: None)
    monkeypatch.setattr(inspect_tpu.importlib.metadata, "version", lambda _: "1.2")
    cells = ("v5e", "demo", *("0",) * 7)
    for last, status in (("none", 0), ("a copy", 1)):
        monkeypatch.setattr(inspect_tpu, "rows", lambda *_, last=last: iter([(*cells, last)]))
        path = tmp_path / "results.md"
        path.write_text("A\n{}\nB\n{}\nC".format(*inspect_tpu.MARKS))
        with pytest.raises(SystemExit) as ended:
            inspect_tpu.main(["--document", str(path)])
        assert ended.value.code == status
        assert "libtpu 1.2:" in path.read_text() and f"| {last} |" in path.read_text()
        assert path.read_text().startswith("A\n") and path.read_text().endswith("\nC")
    with pytest.raises(SystemExit):
        inspect_tpu.main(["--tpus", "v5e"])
    assert "make a part of the table, which --print shows" in capsys.readouterr().err


@pytest.mark.sweep
def test_the_notebook_for_a_first_run_is_rehearsed_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    executed(ROOT / "examples" / "tpu.ipynb")
    seen = json.loads((tmp_path / "tpu-results.json").read_text())
    errors = seen["errors"]
    assert errors["float32, heads 128 wide"] < 1e-5
    assert errors["bfloat16, heads 128 wide"] < 0.02 and errors["bfloat16, heads 64 wide"] < 0.02
    assert seen["demo, auto"]["alone as among others"]
