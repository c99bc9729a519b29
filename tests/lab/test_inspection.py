"""The readers of what the compiler makes, on small things that this test writes itself: no plugin
is needed.
"""

from __future__ import annotations

import struct

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.packing import image, message, riegeli, snappy
from tools import inspect_kernels
from tools.lab.kernel_lab.inspection import (
    deviceless,
    executable_findings,
    hlo,
    sass,
)
from tools.lab.kernel_lab.inspection.cubin import Machine, images, machines
from tools.lab.kernel_lab.inspection.executable import kernels
from tools.lab.kernel_lab.inspection.riegeli_records import FormatError, leaves, unpack_snappy

repetitive = st.lists(
    st.sampled_from([b"abcd", b"abcdabcdabcde", b"\0", b"xy", bytes(range(70))]), max_size=60
).map(b"".join)


@given(repetitive | st.binary(max_size=300))
@example(b"0123456789" + bytes(70000) + b"0123456789")  # a copy from more than 2^16 bytes back
def test_snappy_is_unpacked(data: bytes) -> None:
    assert unpack_snappy(snappy(data)) == data


def test_snappy_of_the_format_description() -> None:
    # "xababab" and a run: a literal of 3, a copy of 4 from 2 back that runs into itself, by hand
    # from format_description.txt.
    assert unpack_snappy(bytes([7, 2 << 2]) + b"xab" + bytes([1 | 0 << 2, 2])) == b"xababab"


@pytest.mark.parametrize(
    "broken",
    [
        bytes([5, 0 << 2]) + b"a",
        bytes([4, 1, 9]),
        bytes([4, 0 << 2]) + b"a" + bytes([1, 0]),
        b"\xff",
    ],
    ids=["short", "copy from before the start", "copy from nowhere", "no length"],
)
def test_broken_snappy_is_refused(broken: bytes) -> None:
    with pytest.raises(FormatError):
        unpack_snappy(broken)


@given(
    st.lists(repetitive | st.binary(max_size=200), min_size=1, max_size=5),
    st.booleans(),
    st.binary(max_size=90),
)
# block headers stand in the middle of a record
@example([bytes(i % 251 for i in range(150_000)), b"end"], False, b"")
def test_records_are_read(records: list[bytes], packed: bool, before: bytes) -> None:
    assert list(leaves(before + riegeli(records, packed=packed) + b"\x12\x00")) == records


def test_files_of_records_inside_records_are_read() -> None:
    inner = riegeli([b"inner one", b"inner two"])
    assert list(leaves(riegeli([b"outer", b"head" + inner]))) == [
        b"outer",
        b"inner one",
        b"inner two",
    ]
    assert list(leaves(b"none at all")) == [b"none at all"]


def test_an_unknown_compression_is_named() -> None:
    file = bytearray(riegeli([b"abc"], packed=False))
    file[24 + 40 + 40] = ord("z")
    with pytest.raises(FormatError, match="'z'"):
        list(leaves(bytes(file)))


TWO = image({"attend": (168, 0, 1024), "spill": (255, 120, 0)})


def test_what_an_image_says_of_its_kernels() -> None:
    assert machines(TWO) == [Machine("attend", 168, 0, 1024), Machine("spill", 255, 120, 0)]
    with pytest.raises(ValueError, match="how many registers attend has"):
        machines(image({"attend": (168, 0, 0)}, attributes=False))


def test_images_are_found_wherever_they_lie() -> None:
    other = image({"g": (16, 0, 0)}, code=b"\x7fELF")
    host = image({}, machine=62)
    data = b"..\x7fELF.." + TWO + host + b"\x7fELF" + other + b"\x7fELF"
    assert list(images(data)) == [TWO, other]
    # Mosaic of jax 0.10: in the host's program
    inside = image({"entry": (0, 0, 0)}, machine=62, code=TWO)
    assert list(images(inside)) == [TWO]


def launch(name: str, code: bytes, *, shared: int | None, threads: tuple[int, ...]) -> bytes:
    spec = message((2, message((1, code))), (3, 8), (4, name.encode()))
    dims = message((1, message(*enumerate(threads, start=1))))
    return message(
        (1, name.encode()), (2, spec), (4, dims), *([] if shared is None else [(6, shared)])
    )


def test_launches_are_read_from_the_messages_around_their_images() -> None:
    single = image({"attend": (168, 0, 1024)})
    mosaic = message((1, 4), (2, image({}, machine=62)), (8, single), (9, b"attend"), (10, 118856))
    old_mosaic = message((1, 1), (2, image({"entry": (0, 0, 0)}, machine=62, code=single)))
    steps = [
        launch("attend", single, shared=74240, threads=(256, 1, 1)),
        launch("spill", TWO, shared=None, threads=(64, 2, 1)),
        mosaic,
        old_mosaic,
    ]
    thunks = message(
        (8, b"jit_step"), *((13, message((1, b"info"), (36, message((3, step))))) for step in steps)
    )
    # The names and numbers of the outermost message are followed by what is no message.
    launched = kernels(b"pjrt" + riegeli([b"", riegeli([b"options", thunks])]))
    assert [(k.name, k.machine.registers, k.threads, k.shared_bytes) for k in launched] == [
        ("attend", 168, 256, 75264),
        ("spill", 255, 128, 0),
        ("attend", 168, None, 119880),
        ("attend", 168, None, None),
    ]


def test_images_in_what_is_no_message_are_kernels_all_the_same() -> None:
    assert [kernel.name for kernel in kernels(b"\x07\x07" + TWO)] == ["attend", "spill"]


HLO = """HloModule jit_f, is_scheduled=true

%region (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%in_place (p.0: bf16[64,16], p.1: s32[4], p.2: bf16[4,16]) -> bf16[64,16] {
  %big = bf16[64,16]{1,0} copy(%p.0)
  %put = bf16[64,16]{1,0} scatter(%big, %p.1, %p.2), to_apply=%region
  ROOT %seen = bf16[64,16]{1,0} bitcast(%put)
}

%sliced (p.3: bf16[2,64,16]) -> (bf16[64,16], f32[4]) {
  %cut = bf16[1,64,16]{2,1,0} dynamic-slice(%p.3), dynamic_slice_sizes={1,64,16}
  %cut.b = bf16[64,16]{1,0} bitcast(%cut)
  %small = f32[4]{0} constant({1, 2, 3, 4})
  ROOT %both = (bf16[64,16]{1,0}, f32[4]{0}) tuple(%cut.b, %small)
}

%body (state: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %state = (s32[], bf16[64,16]{1,0}) parameter(0)
  %item = bf16[64,16]{1,0} get-tuple-element(%state), index=1
  %copied = bf16[64,16]{1,0} copy(%item)
  ROOT %next = (s32[], bf16[64,16]{1,0}) tuple(%count, /*index=1*/%copied)
}

ENTRY %main (a: bf16[2,64,16], b: bf16[64,16]) -> bf16[64,16] {
  %a = bf16[2,64,16]{2,1,0:T(8,128)} parameter(0), sharding={replicated}
  %b = bf16[64,16]{1,0} parameter(1)
  %written = bf16[64,16]{1,0} fusion(%b, %i, %n), kind=kInput, calls=%in_place, metadata={op_name="jit(f)/scatter"}
  %layer = (bf16[64,16]{1,0}, f32[4]{0}) fusion(%a), kind=kLoop, calls=%sliced
  %attend.1 = (f32[4]{0}, f32[4]{0}) custom-call(%b), custom_call_target="__gpu$xla.gpu.triton", METADATA
  %attend.2 = f32[4]{0} custom-call(%b), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/attend/mpmd_map"}
  %write = bf16[64,16]{1,0} custom-call(%written), custom_call_target="mosaic_gpu_v2", ALIAS, metadata={op_name="jit(f)/write/mpmd_map"}
  %norm = bf16[64,16]{1,0} custom-call(%written), custom_call_target="__cudnn"
  %start = ((bf16[2,64,16]{2,1,0}), bf16[1,8,16]{2,1,0}, s32[]) slice-start(%a), slice={[0:1], [0:8], [0:16]}
  %large-start = ((bf16[2,64,16]{2,1,0}), bf16[1,64,16]{2,1,0}, s32[]) slice-start(%a), slice={[0:1], [0:64], [0:16]}
  %large-done = bf16[1,64,16]{2,1,0} slice-done(%large-start)
  %loop = (s32[], bf16[64,16]{1,0}) while(%init), condition=%cond, body=%body
  ROOT %turned = bf16[16,64]{1,0} transpose(%write), dimensions={1,0}
}
"""
HLO = HLO.replace("ALIAS", "output_to_operand_aliasing={{}: (0, {})}")
HLO = HLO.replace("METADATA", 'metadata={op_name="jit(f)/attend/pallas_call"}')


def test_large_arrays_that_are_made_are_found() -> None:
    arrays = hlo.arrays_made(hlo.computations(HLO), 2048)
    assert {(each.name, each.how, each.num_bytes) for each in arrays} == {
        ("copied", "copy", 2048),
        ("layer", "dynamic-slice", 2048),
        ("norm", "custom-call", 2048),
        ("large-start", "slice-start", 2048),
        ("turned", "transpose", 2048),
    }
    assert hlo.arrays_made(hlo.computations(HLO), 2049) == []


def test_calls_of_pallas_kernels_are_counted_by_their_names() -> None:
    assert hlo.kernel_calls(hlo.computations(HLO)) == {"attend": 2, "write": 1}
    assert [
        executable_findings.stem(name)
        for name in ("attend", "attend__12", "attend_mosaic_gpu_kernel", "write_2")
    ] == [
        *["attend"] * 3,
        "write_2",
    ]


def test_instructions_are_counted() -> None:
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR16][R2.64] ;
        /*0020*/             @UP1  UTMALDG.4D [UR8], [UR4] ;
.L_x_1:
        /*0030*/                   LDGSTS.E [R5+0x10], desc[UR16][R2.64], P1 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*1f050*/             @P2  STL.64 [R1+0x8], R10 ;
    """
    instructions = sass.parse(text)
    assert sum(instructions.values()) == 6
    assert (
        sass.count(instructions, "LDGSTS") == 2 and sass.count(instructions, "LDGSTS", "128") == 1
    )
    assert [
        sass.count(instructions, name) for name in ("UTMALDG", "HGMMA", "STL", "LDL", "LD")
    ] == [
        1,
        1,
        1,
        0,
        0,
    ]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "_version", lambda name: None)
    assert f'pip install "jax[cuda13-local]=={jax.__version__}"' in str(deviceless.unavailable())
    monkeypatch.setattr(deviceless, "_version", lambda name: "0.9.1" if "13" in name else None)
    assert "jax-cuda13-plugin 0.9.1" in str(deviceless.unavailable())
    deviceless.describe_mesh.cache_clear()
    with pytest.raises(RuntimeError, match="another version"):
        deviceless.compile_for(None)
    with pytest.raises(ValueError, match="one of h200, h100, .*not 'h300'"):
        deviceless.describe_mesh("h300")


def test_a_number_that_never_ends_is_refused() -> None:
    with pytest.raises(FormatError, match="within a number"):
        unpack_snappy(struct.pack("<Q", 2**64 - 1))


def test_the_tables_of_the_document_are_replaced_and_nothing_else() -> None:
    old = (
        f"# Kernels\n\nText.\n\n{inspect_kernels.BEGIN}\nold\n{inspect_kernels.END}\n\nMore text.\n"
    )
    new = inspect_kernels.replace_section(old, "| new |")
    assert (
        new
        == f"# Kernels\n\nText.\n\n{inspect_kernels.BEGIN}\n\n| new |\n\n{inspect_kernels.END}\n\nMore text.\n"
    )
    assert inspect_kernels.replace_section(new, "| new |") == new
    for wrong in ("no marks", f"{inspect_kernels.END} {inspect_kernels.BEGIN}", old + old):
        with pytest.raises(ValueError, match="once each and in this order"):
            inspect_kernels.replace_section(wrong, "| new |")


def test_the_tool_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        inspect_kernels, "unavailable", lambda: 'not installed: pip install "jax[cuda13-local]"'
    )
    with pytest.raises(SystemExit):
        inspect_kernels.main(["--check"])
    assert 'pip install "jax[cuda13-local]"' in capsys.readouterr().err
