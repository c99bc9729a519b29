"""The program that checks the kernels for CPUs with several instruction sets."""

from __future__ import annotations

import shutil

import pytest

from pallas_kernels.cpu import build
from tools.lab import check_instructions
from tools.lab.check_instructions import mistakes, parse

RIGHT = "product\t12ab\t0.0e+00\tok\nattention\t34cd\t1.0e-03\tok\n"
END = "instructions of bfloat16 and int8: 0, 0; wrong: 0\n"
# A file of the kernels, a line of it, and a mistake in its place.
PLANTED = {
    "the bits depend on the number of rows": (
        "packed.cc",
        "if (bias) value += *bias;",
        "if (p.num_rows == 5) value += splat(1e-3f);",
    ),
    "a chunk has another factor of a value": (
        "attention.cc",
        "const Vec value = values[j * value_vecs + first + i];",
        "const Vec value = values[j * value_vecs + first + i] * splat(j == 3 ? 1.01f : 1.0f);",
    ),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, []),
        (RIGHT.replace("12ab", "12ac"), ["b: product: other bits than a"]),
        (RIGHT.replace("ok\n", "ok\r\n") + "[ 1.0] a line of a console\n", []),
        (
            RIGHT.replace("1.0e-03\tok", "1.0e+00\tthe error is too large"),
            ["b: attention: the error is too large (error 1)"],
        ),
        (
            RIGHT + "product\t12ac\t0.0e+00\tok\n",
            [
                "b: product: other bits with other instructions (error 0)",
                "b: product: other bits than a",
            ],
        ),
    ],
)
def test_outputs_are_compared(text, expected):
    outputs = {"a": parse(RIGHT + END), "b": parse(text + END)}
    assert list(mistakes(outputs)) == expected


def test_a_part_of_an_output_is_no_output(tmp_path, capsys):
    (tmp_path / "output").write_text(RIGHT)
    with pytest.raises(SystemExit):
        check_instructions.main(["--outputs", str(tmp_path / "output"), "--only", "none"])
    assert "the output ends after 2 cases: its last line is missing" in capsys.readouterr().err


@pytest.mark.sweep
def test_the_instruction_sets_that_can_be_run_here_agree(capsys):
    if all(target.reason for target in check_instructions.targets()):
        pytest.skip("no instruction set of the kernels can be run here")
    assert check_instructions.main([]) == 0, capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake, tmp_path, capsys):
    name = next((target.name for target in check_instructions.targets() if not target.reason), None)
    if name is None:
        pytest.skip("no instruction set of the kernels can be run here")
    file, line, wrong = PLANTED[mistake]
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(line) == 1
    (sources / file).write_text(text.replace(line, wrong))
    assert check_instructions.main(["--only", name], sources) == 1
    assert "other bits" in capsys.readouterr().out
