"""Machine code for sm_90a keeps the operands that a loop keeps (needs nvcc and nvdisasm)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from tests.machine_code import NVDISASM, kept_operands, lost_in, lost_operands

from obelisk.app.loading import load_program
from obelisk.ir import Graph
from obelisk.lower.cuda import CudaOptions, lower_cuda
from obelisk.machine import find
from obelisk.search import Budget, search

H200 = find("h200")
CHOICES = [
    CudaOptions(),
    CudaOptions(row_tile=64, groups=2, loop_tile=64),
    CudaOptions(row_tile=64, groups=3, loop_tile=64, ahead=True),
]


def tools() -> tuple[str, str]:
    """The compiler and the disassembler, or a loud skip."""
    nvcc, triton = shutil.which("nvcc"), importlib.util.find_spec("triton")
    if nvcc is None or triton is None or triton.origin is None:
        pytest.skip("looking at machine code needs nvcc, and nvdisasm, which comes with triton")
    return nvcc, str(Path(triton.origin).parents[1] / NVDISASM)


@pytest.fixture(scope="module")
def normed() -> Graph:
    """Attention with norms whose values are scaled in their own tile, 128 rows a block: a tile of
    64 keys then has rows for four of eight warps.
    """
    found = search(load_program("qknorm", batch=8, dtype="f16"), H200, budget=Budget(seconds=60))
    return found.candidates[1].graph


@pytest.mark.parametrize("options", CHOICES, ids=lambda o: f"{o.row_tile}, {o.groups}, {o.ahead}")
def test_operands_of_a_loop_stay(options: CudaOptions, normed: Graph, tmp_path: Path) -> None:
    kernel = lower_cuda(normed, H200, options).kernels[0]
    assert "ob_wgmma<1>" in kernel.source
    assert lost_in(kernel.source, tmp_path, *tools()) == []


def test_no_branch_stands_between_a_product_and_its_wait(normed: Graph) -> None:
    """With one around the work of the warps that have rows, ptxas 13.0 gave the queries' registers
    to the probabilities: right in the first iteration, NaN in the end.
    """
    text = lower_cuda(normed, H200).kernels[0].source
    inside = text[text.index("ob_wgmma<1>") : text.index("ob_wgmma_wait();")]
    assert "break" not in inside
    assert "if (row < 64) ob_stmatrix(" in inside


def test_what_a_loop_overwrites_is_seen() -> None:
    """The fault in short, as it was: `R88` is multiplied, and made anew behind that."""
    ptx = """
$L__BB0_4:
wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1,%f2}, {%r155,%r156,%r157,%r158}, %rd34;
cvt.rn.f16x2.f32 %r373, %f1, %f2;
wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f3,%f4}, {%r373,%r374,%r375,%r376}, %rd39;
@%p14 bra \t$L__BB0_4;
"""
    assert kept_operands(ptx) == [True, False]
    sass = """
.L_x_5:
{restored}
HGMMA.64x64x16.F32 R24, R88, gdesc[UR4].tnspB, RZ, !UPT ;
F2FP.F16.F32.PACK_AB R{made}, R25, R24 ;
HGMMA.64x64x16.F32 R56, R{made}, gdesc[UR4].tnspB, R56 ;
@!P1 BRA `(.L_x_5) ;
"""
    assert lost_operands(sass.format(made=24, restored=""), [True, False]) == []
    assert len(lost_operands(sass.format(made=88, restored=""), [True, False])) == 1
    again = "LDL.128 R88, [R1+0x20] ;"
    assert lost_operands(sass.format(made=88, restored=again), [True, False]) == []
