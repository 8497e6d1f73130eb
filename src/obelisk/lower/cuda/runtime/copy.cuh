// Copies from device to shared memory, and the barriers in shared memory that bulk copies report to.

OB_DEVICE unsigned ob_shared(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// The first whole group of eight lines of 128 bytes at or behind `p`.
OB_DEVICE char *ob_line(char *p) { return p + (-ob_shared(p) & 1023); }

// 16 bytes, of which the first `valid` are read and the rest is zero.
OB_DEVICE void ob_copy16(unsigned to, const void *from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
               : "memory");
}
OB_DEVICE void ob_copy16(unsigned to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
OB_DEVICE void ob_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> OB_DEVICE void ob_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Shared memory written by these threads, or by their own copies, becomes visible to the tensor cores
// and is in order before later bulk copies.
OB_DEVICE void ob_operand_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Where 16 bytes of a tile lie. STRIDE bytes between rows; or, with STRIDE 0, blocks of 64 columns
// whose rows are 128 bytes, with the eight chunks of row r in the order chunk ^ (r % 8).
template <int ROWS, int STRIDE> OB_DEVICE unsigned ob_place(int row, int chunk) {
  if constexpr (STRIDE == 0) {
    return (chunk >> 3) * (ROWS * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
  } else {
    return row * STRIDE + chunk * 16;
  }
}

// A tile of ROWS by COLUMNS 16-bit elements, of which rows by columns exist (all of them if FULL), by
// THREADS threads. `stride` is in elements between rows in device memory; STRIDE as in ob_place.
template <int ROWS, int COLUMNS, int STRIDE, int THREADS, bool FULL, class T>
OB_DEVICE void ob_copy_tile(unsigned to, const T *from, long long stride, int rows, int columns, int t) {
  constexpr int CHUNKS = COLUMNS / 8, TOTAL = ROWS * CHUNKS;
  constexpr bool EVEN = THREADS % CHUNKS == 0;  // then a thread stays in its column
  constexpr int STEP = EVEN ? THREADS / CHUNKS : 1;
  constexpr bool FIXED = EVEN && (STRIDE != 0 || STEP % 8 == 0);
  constexpr int DOWN = STRIDE == 0 ? 128 : STRIDE;
  const int first = t / CHUNKS, across = t % CHUNKS;
  const T *const source = from + first * stride + across * 8;
  const unsigned target = to + ob_place<ROWS, STRIDE>(first, across);
#pragma unroll
  for (int i = 0; i < (TOTAL + THREADS - 1) / THREADS; i++) {
    const int x = i * THREADS + t;
    const int row = EVEN ? first + i * STEP : x / CHUNKS, chunk = EVEN ? across : x % CHUNKS;
    const T *const at = EVEN ? source + i * STEP * stride : from + row * stride + chunk * 8;
    const unsigned there = FIXED ? target + i * STEP * DOWN : to + ob_place<ROWS, STRIDE>(row, chunk);
    if (TOTAL % THREADS == 0 || x < TOTAL) {
      if (FULL) {
        ob_copy16(there, at);
      } else {
        int valid = (columns - chunk * 8) * 2;
        valid = row < rows ? (valid > 16 ? 16 : valid < 0 ? 0 : valid) : 0;
        ob_copy16(there, valid > 0 ? at : from, valid);
      }
    }
  }
}

// The same for any strides and alignments, element by element.
template <int ROWS, int COLUMNS, int STRIDE, int THREADS, class T>
OB_DEVICE void ob_copy_any(unsigned to, const T *from, long long stride, long long step, int rows, int columns,
                           int t) {
  for (int x = t; x < ROWS * COLUMNS; x += THREADS) {
    const int row = x / COLUMNS, column = x % COLUMNS;
    unsigned short v = 0;
    if (row < rows && column < columns) v = from[row * stride + column * step].x;
    const unsigned there = to + ob_place<ROWS, STRIDE>(row, column / 8) + column % 8 * 2;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(there), "h"(v) : "memory");
  }
}
