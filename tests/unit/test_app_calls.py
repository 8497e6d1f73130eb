"""R08: whatever way a tensor does not match: a right answer, or an error that names both sides."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from obelisk.app.calls import Signature
from obelisk.base.errors import CallError
from obelisk.ir import DType, KernelGraph


def signature(dtype: str = "f16") -> Signature:
    """X (8, 64) @ W (64, 32)."""
    g = KernelGraph("linear")
    x, w = g.input((8, 64), dtype, name="x"), g.input((64, 32), dtype, name="w")
    g.output(g.matmul(x, w), name="y")
    return Signature(g.freeze())


W = np.zeros((64, 32), np.float16)
X = np.zeros((8, 64), np.float16)


def misaligned() -> np.ndarray[Any, Any]:
    """A (8, 64) f16 array one byte off."""
    raw = np.zeros(8 * 64 * 2 + 1, np.uint8)
    return np.frombuffer(raw.data, np.float16, 8 * 64, offset=1).reshape(8, 64)


WRONG = {
    "fewer columns": (
        np.zeros((8, 63), np.float16),
        r"'x' has shape \(8, 63\), expected \(8, 64\)",
    ),
    "fewer rows": (np.zeros((4, 64), np.float16), r"'x' has shape \(4, 64\), expected \(8, 64\)"),
    "dtype": (np.zeros((8, 64), np.float32), "'x' has dtype float32, expected float16"),
    "bf16": (np.zeros((8, 64), DType.BF16.numpy), "'x' has dtype bfloat16, expected float16"),
    "byte order": (np.zeros((8, 64), ">f2"), "'x' has dtype >f2, expected float16"),
    "transposed": (
        np.zeros((64, 8), np.float16).T,
        r"'x' has strides \(1, 8\).*expected \(64, 1\).*ascontiguousarray",
    ),
    "every other column": (np.zeros((8, 128), np.float16)[:, ::2], r"strides \(128, 2\)"),
    "reversed": (np.zeros((8, 64), np.float16)[::-1], r"strides \(-64, 1\)"),
    "zero size": (np.zeros((0, 64), np.float16), r"shape \(0, 64\)"),
    "misaligned": (misaligned(), "1 bytes past a multiple of 2"),
    "a list": ([[0.0] * 64] * 8, "'x' is a builtins.list, expected a numpy array"),
    "a masked array": (np.ma.zeros((8, 64), np.float16), "'x' is a numpy.ma"),
    "nothing": (None, "'x' is a builtins.NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numpy_inputs_are_refused(case: str) -> None:
    """The error names the input and both sides; it is a TypeError and a ValueError."""
    bad, message = WRONG[case]
    with pytest.raises(CallError, match=message) as caught:
        signature().bind([bad, W])
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


def test_right_inputs_are_passed_without_a_copy() -> None:
    """Addresses are those of the caller's memory; strides of axes of extent 1 do not matter."""
    bound = signature().bind([X, W])
    assert bound.inputs == [X.ctypes.data, W.ctypes.data]
    assert bound.outputs == [bound.results[0].ctypes.data]
    g = KernelGraph()
    g.output(g.exp(g.input((1, 64))))
    row = np.zeros((9, 64), np.float32)[4:5]
    odd = np.lib.stride_tricks.as_strided(row, (1, 64), (4000, 4))
    assert Signature(g.freeze()).bind([odd]).inputs == [row.ctypes.data]


def test_declared_strides_are_what_is_expected() -> None:
    """A program over a transposed view takes that view, and refuses the dense tensor."""
    g = KernelGraph()
    g.output(g.exp(g.input((8, 64), "f32", strides=(1, 8))))
    s = Signature(g.freeze())
    view = np.zeros((64, 8), np.float32).T
    assert s.bind([view]).inputs == [view.ctypes.data]
    with pytest.raises(CallError, match=r"strides \(64, 1\).*expected \(1, 8\)"):
        s.bind([np.zeros((8, 64), np.float32)])


def test_number_of_inputs() -> None:
    """Too few or too many: the signature is shown."""
    with pytest.raises(CallError, match=r"linear\(x: f16\[8,64\], w: f16\[64,32\]\).*got 1"):
        signature().bind([X])


def test_outputs_of_the_caller() -> None:
    """`out` is checked as strictly as an input, and must not overlap one or be read-only."""
    s = signature("f32")
    x, w = np.zeros((8, 64), np.float32), np.zeros((64, 32), np.float32)
    y = np.zeros((8, 32), np.float32)
    assert s.bind([x, w], y).outputs == [y.ctypes.data]
    with pytest.raises(CallError, match=r"output 'y' has shape \(32, 8\), expected \(8, 32\)"):
        s.bind([x, w], np.zeros((32, 8), np.float32))
    inside = w.reshape(-1)[10 : 10 + 256].reshape(8, 32)
    with pytest.raises(CallError, match="output 'y' shares memory with 'w'"):
        s.bind([x, w], inside)
    frozen = y.copy()
    frozen.flags.writeable = False
    with pytest.raises(CallError, match="output 'y' is read-only"):
        s.bind([x, w], frozen)
    with pytest.raises(CallError, match="has 1 results, out has 2"):
        s.bind([x, w], (y, y))


def test_outputs_that_overlap_each_other() -> None:
    """Two results in one buffer are refused."""
    g = KernelGraph()
    x = g.input((4, 4), name="x")
    g.output(g.exp(x), name="a")
    g.output(g.neg(x), name="b")
    y = np.zeros((4, 4), np.float32)
    with pytest.raises(CallError, match="output 'b' shares memory with 'a'"):
        Signature(g.freeze()).bind([np.ones((4, 4), np.float32)], (y, y))


def test_torch_tensors() -> None:
    """The same rules for torch; results are tensors; gradients and other devices are refused."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    s = signature()
    x, w = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(64, 32, dtype=torch.float16)
    bound = s.bind([x, w])
    assert bound.inputs == [x.data_ptr(), w.data_ptr()]
    assert isinstance(bound.results[0], torch.Tensor)
    assert bound.results[0].dtype is torch.float16
    cases = {
        r"shape \(8, 63\), expected \(8, 64\)": x[:, :63],
        r"dtype torch.bfloat16, expected torch.float16": x.bfloat16(),
        r"strides \(1, 8\).*expected \(64, 1\).*\.contiguous": torch.zeros(64, 8).half().t(),
        r"strides \(128, 2\)": torch.zeros(8, 128).half()[:, ::2],
        r"is on meta, expected cpu": x.to("meta"),
        r"requires grad": x.clone().requires_grad_(),
        r"layout torch.sparse_coo": x.to_sparse(),
    }
    for message, bad in cases.items():
        with pytest.raises(CallError, match=message):
            s.bind([bad, w])
    with torch.no_grad():
        s.bind([x.clone().requires_grad_(), w])
    with pytest.raises(CallError, match="mixed"):
        s.bind([x, W])
    with pytest.raises(CallError, match="not of the kind"):
        s.bind([x, w], np.zeros((8, 32), np.float16))
    shifted = torch.zeros(8 * 64 + 1, dtype=torch.float16)[1:].reshape(8, 64)
    assert s.bind([shifted, w]).inputs[0] == shifted.data_ptr()  # aligned to its elements: taken


def test_a_check_costs_microseconds() -> None:
    """Far below the millisecond that a call may cost on top of its kernel."""
    s = signature()
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        s.bind([X, W])
        times.append(time.perf_counter() - begin)
    assert sorted(times)[25] < 3e-4
