"""How fast a GPU's SM executes text that it runs through once a turn, by the text's size: what a
megakernel's layer is.

    python bench/cuda_text.py [ARCH]              # build and run
    python bench/cuda_text.py --program FILE      # build alone

Every warp executes straight text of so many KB again and again, in four independent chains, so
that nothing but fetching bounds it. Printed: cycles of a scheduler for one instruction, with one
warp and with eight on an SM, on one SM and on all of them (which share what lies behind their own
caches).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

SIZES = (2, 8, 16, 24, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144, 160, 192, 256)  # KB
EACH = 16  # bytes of an instruction since sm_70
KERNEL = """#include <cstdio>
template <int COUNT> __global__ void text(unsigned x, int rounds, long long *t, unsigned *o) {
  unsigned c[4] = {x, x + 1, x + 2, x + threadIdx.x}, a = x * 3, b = x * 5;
  long long from = 0;
#pragma unroll 1
  for (int r = -2; r < rounds; r++) {
    if (r == 0) __syncthreads(), from = clock64();
#pragma unroll
    for (int n = 0; n < COUNT; n++)
      asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(c[n % 4]) : "r"(a), "r"(b));
  }
  const long long to = clock64();
  if ((c[0] ^ c[1] ^ c[2] ^ c[3]) == 12345) o[threadIdx.x] = 1;
  if (threadIdx.x % 32 == 0) t[blockIdx.x * 8 + threadIdx.x / 32] = to - from;
}
template <int KB> void measure(int sms) {
  constexpr int COUNT = KB * 1024 / @EACH, ROUNDS = 40;
  long long *t;
  unsigned *o;
  cudaMallocManaged(&t, sms * 64), cudaMallocManaged(&o, 4096);
  printf("%4d KB:", KB);
  for (int blocks : {1, sms})
    for (int warps : {1, 8}) {
      for (int n = 0; n < 2; n++)
        text<COUNT><<<blocks, 32 * warps>>>(3, ROUNDS, t, o), cudaDeviceSynchronize();
      double sum = 0;
      for (int b = 0; b < blocks; b++)
        for (int w = 0; w < warps; w++) sum += t[b * 8 + w];
      const double each = sum / (blocks * warps) / ((double)ROUNDS * COUNT * ((warps + 3) / 4));
      printf("  %3d SMs, %d warps %6.2f", blocks, warps, each);
    }
  printf("  (%s)\\n", cudaGetErrorString(cudaGetLastError()));
}
int main() {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  printf("%s: cycles of a scheduler for one instruction\\n", p.name);
@CALLS
}
"""


def build(arch: str, program: Path) -> None:
    """Compile the program that prints the table."""
    calls = "\n".join(f"  measure<{kb}>(p.multiProcessorCount);" for kb in SIZES)
    text = program.with_suffix(".cu")
    text.write_text(KERNEL.replace("@EACH", str(EACH)).replace("@CALLS", calls))
    command = ["nvcc", "-w", "-O3", "-std=c++17", f"-arch={arch}", "-o", str(program), str(text)]
    subprocess.run(command, check=True, timeout=300)


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", nargs="?", default="sm_90a")
    parser.add_argument("--program", type=Path)
    args = parser.parse_args()
    if args.program is not None:
        build(args.arch, args.program)
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "text"
        build(args.arch, program)
        subprocess.run([program], check=True, timeout=60)


if __name__ == "__main__":
    main()
