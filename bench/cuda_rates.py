"""How often a scheduler of the GPU here issues what weights are multiplied by: cycles for one
instruction, on one SM with 1, 4 and 8 warps.

    python bench/cuda_rates.py [ARCH]

A warp's instructions are CHAINS independent chains of dependent ones. The last two are what a slab
of 4-bit weights asks for: words from shared memory, masks, products.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

CHAINS, ROUNDS = (1, 2, 4, 6), 256


def mma(shape: str, types: str, kind: str, wide: int = 4) -> str:
    """A product of `wide` registers of A and half as many of B into the sums of chain i."""
    a = ", ".join(f"%{4 + k}" for k in range(wide))
    b = ", ".join(f"%{4 + wide + k}" for k in range(wide // 2))
    sums = ", ".join(f'"+{kind}"(c[i][{k}])' for k in range(4))
    ins = ", ".join(f'"r"({r})' for r in ("a0", "a1", "a2", "a3")[:wide])
    ins += ", " + ", ".join(f'"r"({r})' for r in ("b0", "b1")[: wide // 2])
    text = f"mma.sync.aligned.{shape}.row.col.{types} {{%0,%1,%2,%3}}, {{{a}}}, {{{b}}}, "
    return f'asm volatile("{text}{{%0,%1,%2,%3}};" : {sums} : {ins});'


def plain(text: str) -> str:
    """An instruction on one register of sums and two others."""
    return f'asm volatile("{text};" : "+r"(c[i][0]) : "r"(a0), "r"(b0));'


S8, F16 = mma("m16n8k32", "s32.s8.s8.s32", "r"), mma("m16n8k16", "f32.f16.f16.f32", "f")
WORD = "const unsigned w = words[32 * (r + n)], y = "
BODIES = {  # name: type of the sums, text
    "mma m16n8k32 s8": ("int", S8),
    "mma m16n8k16 s8": ("int", mma("m16n8k16", "s32.s8.s8.s32", "r", 2)),
    "mma m16n8k16 f16": ("float", F16),
    "mma m16n8k16 bf16": ("float", mma("m16n8k16", "f32.bf16.bf16.f32", "f")),
    "mma m16n8k8 f16": ("float", mma("m16n8k8", "f32.f16.f16.f32", "f", 2)),
    "mma m16n8k32 e4m3": ("float", mma("m16n8k32", "f32.e4m3.e4m3.f32", "f")),
    "dp4a": ("unsigned", plain("dp4a.s32.s32 %0, %1, %2, %0")),
    "hfma2": ("unsigned", plain("fma.rn.f16x2 %0, %1, %2, %0")),
    "lop3": ("unsigned", plain("lop3.b32 %0, %0, %1, %2, 0x6a")),
    "prmt": ("unsigned", plain("prmt.b32 %0, %0, %1, %2")),
    "word f16": (
        "float",
        f"{{ {WORD}__byte_perm(w, 0, 0x4341), a0 = w & 0xf000f, a1 = w & 0xff00ff, "
        f"a2 = y & 0xf000f, a3 = y; {F16} }}",
    ),
    "two words s8": (
        "int",
        f"{{ {WORD}words[32 * (r + n + 1)], a0 = w << 4 & 0xf0f0f0f0, a1 = w & 0xf0f0f0f0, "
        f"a2 = y << 4 & 0xf0f0f0f0, a3 = y & 0xf0f0f0f0; {S8} }}",
    ),
}
KERNEL = """
template <int CHAINS> __global__ void k@(unsigned x, long long *t, unsigned *o) {
  @KIND c[CHAINS][4] = {};
  unsigned a0 = x, a1 = x + threadIdx.x, a2 = x * 3, a3 = x * 5, b0 = x * 7, b1 = x * 11;
  __shared__ unsigned all[32 * (ROUNDS + 32)];
  for (int i = threadIdx.x; i < 32 * (ROUNDS + 32); i += blockDim.x) all[i] = x * i;
  const unsigned *const words = all + threadIdx.x % 32;
  __syncthreads();
  const long long from = clock64();
#pragma unroll 1
  for (int r = 0; r < ROUNDS; r += 16)
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int i = 0; i < CHAINS; i++) { @BODY }
  const long long to = clock64();
  unsigned s = 0;
  for (int i = 0; i < CHAINS; i++) for (int j = 0; j < 4; j++) s += (unsigned)c[i][j];
  if (s == 12345) o[threadIdx.x] = s;
  if (threadIdx.x % 32 == 0) t[threadIdx.x / 32] = to - from;
}
"""
MAIN = """
template <class F> void measure(const char *name, int chains, F f) {
  static long long *t;
  static unsigned *o;
  if (!t) cudaMallocManaged(&t, 4096), cudaMallocManaged(&o, 4096);
  printf("%-20s chains %d:", name, chains);
  for (int warps : {1, 4, 8}) {
    for (int n = 0; n < 3; n++) f<<<1, 32 * warps>>>(0x03020100u, t, o), cudaDeviceSynchronize();
    long long most = 0;
    for (int w = 0; w < warps; w++) most = t[w] > most ? t[w] : most;
    printf("  %d warps %6.2f", warps, (double)most / (ROUNDS * chains * ((warps + 3) / 4)));
  }
  printf("  (%s)\\n", cudaGetErrorString(cudaGetLastError()));
}
"""


def source() -> str:
    """A program that prints the table."""
    out, calls = [f"#include <cstdio>\n#define ROUNDS {ROUNDS}"], []
    for k, (name, (kind, body)) in enumerate(BODIES.items()):
        text = KERNEL.replace("@KIND", kind).replace("@BODY", body)
        out.append(text.replace("k@", f"k{k}"))
        calls += [f'  measure("{name}", {chains}, k{k}<{chains}>);' for chains in CHAINS]
    return "\n".join([*out, MAIN, "int main() {", *calls, "}"])


def main() -> None:
    """Build, run, print."""
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
    with tempfile.TemporaryDirectory() as folder:
        text, program = Path(folder) / "rates.cu", Path(folder) / "rates"
        text.write_text(source())
        command = ["nvcc", "-w", "-O3", "-std=c++17", f"-arch={arch}", "-o", program, text]
        subprocess.run(command, check=True, timeout=200)
        print("cycles of a scheduler for one instruction")
        subprocess.run([program], check=True, timeout=60)


if __name__ == "__main__":
    main()
