"""The small functions that generated Triton kernels share, as text.

Takes the body of a kernel; gives the imports and those functions that it calls, in a fixed order.
Everything here runs in Triton's interpreter too: no function of a device library is used.
"""

from __future__ import annotations

IMPORTS = """import triton
import triton.language as tl
"""

_BEGIN = '''
@triton.jit
def ob_begin(EARLY: tl.constexpr):
    """A launch may begin before the one ahead of it has ended; from here on that one has."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
'''

_PART = '''
@triton.jit
def ob_part(full, at, chunk, start, tile):
    """How much of a tile is there: the part of [at, at + chunk) from `start` on, within `full`."""
    stop = tl.minimum(at + tl.minimum(start + tile, chunk), full)
    return tl.maximum(stop - (at + start), 0)
'''

_DOT = '''
@triton.jit
def ob_dot(a, b, c):
    """a @ b + c, summed in f32; the interpreter multiplies bf16 wrongly, so it gets f32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")
'''

_LARGER = '''
@triton.jit
def ob_larger(a, b):
    """The larger; NaN where either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
'''

_MAX = '''
@triton.jit
def ob_max(x, axis: tl.constexpr):
    """The largest along an axis; NaN where one is. (The interpreter folds by functions slowly.)"""
    if INTERPRETED:
        y = tl.max(x, axis)
    else:
        y = tl.reduce(x, axis, ob_larger)
    return y
'''

_DECAY = '''
@triton.jit
def ob_decay(old, new):
    """exp(old - new) for a running maximum; 0 before anything was seen."""
    return tl.where(old == float("-inf"), 0.0, tl.exp(old - new))
'''

_TANH = '''
@triton.jit
def ob_tanh(x):
    """tanh by exp; a series near 0, where the difference would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    s = x * x
    near = x * (1.0 - s * (0.333333333333333333 - s * (0.133333333333333333
        - s * (0.053968253968253968 - s * 0.021869488536155203))))
    return tl.where(tl.abs(x) < 0.02, near, tl.where(x < 0.0, -y, y))
'''

_FROM_F8 = '''
@triton.jit
def ob_from_f8(x):
    """f8 (e4m3, no infinity) in a byte -> f32."""
    v = x.to(tl.int32)
    e, m = (v >> 3) & 15, v & 7
    normal = (((e + 120) << 23) | (m << 20)).to(tl.float32, bitcast=True)
    a = tl.where(e > 0, normal, m.to(tl.float32) * 0.001953125)
    a = tl.where((v & 127) == 127, float("nan"), a)
    return tl.where((v & 128) != 0, -a, a)
'''

_TO_F8 = '''
@triton.jit
def ob_to_f8(x):
    """f32 -> f8 (e4m3) in a byte, to nearest even; NaN above 464."""
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    small = x * 512.0  # below 2^-6: steps of 2^-9, to nearest even by adding 1.5 * 2^23
    low = (tl.abs(small) + 12582912.0).to(tl.int32, bitcast=True) & 0x3FFFFF
    high = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(a < 0x3C800000, low, high)
    code = tl.where(a <= 0x43E80000, code, 127)
    return (code | ((bits >> 24) & 128)).to(tl.uint8)
'''

_TO_BF16 = '''
@triton.jit
def ob_to_bf16(x):
    """f32 -> bf16, to nearest even; the interpreter would cut off."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)
'''

_HELPERS = {
    "ob_begin": _BEGIN,
    "ob_part": _PART,
    "ob_dot": _DOT,
    "ob_larger": _LARGER,
    "ob_max": _MAX,
    "ob_decay": _DECAY,
    "ob_tanh": _TANH,
    "ob_from_f8": _FROM_F8,
    "ob_to_f8": _TO_F8,
    "ob_to_bf16": _TO_BF16,
}


def prelude(body: str) -> str:
    """Imports and the shared functions that `body` names."""
    text = body
    used: list[str] = []
    for name in reversed(_HELPERS):  # a function calls only those before it
        if f"{name}(" in text or f"{name})" in text:
            used.insert(0, name)
            text += _HELPERS[name]
    head = IMPORTS
    if "INTERPRETED" in text:
        head = "import os\n\n" + head
    if "ob_begin" in used:
        head += "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
    if "INTERPRETED" in text:
        head += '\nINTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")\n'
    return head + "".join("\n" + _HELPERS[name] for name in used)
