/* Matrix products on strided operands of one compute type: c = a b, or c += a b.
 *
 * Pasted once per type, with OB_T the element, OB_V its vector and OB_(name) the name with the type's suffix; gives
 * OB_(product). c has unit column stride. Two ways:
 *   packed: both operands are copied into panels (OB_MR rows of a, OB_NV vectors of columns of b) so that the
 *     innermost loop, OB_MR x OB_NV vector sums in registers, reads memory in order; OB_KC deep, OB_MC rows and OB_NC
 *     columns at a time, so that a panel of b stays in the first cache and the rows of a in the second.
 *   streamed, for few rows: b is read once, in place, OB_SK rows at a time; OB_SUMS sums wait in the cache. The work is what memory can deliver, so b is fetched ahead.
 * `work` holds the panels or the sums: as many elements as `work_elements` of the emitter computes.
 */
#define OB_W ((long)(sizeof(OB_V) / sizeof(OB_T)))
#define OB_NR (OB_NV * OB_W)

/* One step of depth: a vector of b per column vector, one element of a per row. */
#define OB_STEP                                                                             \
  {                                                                                         \
    OB_V bv[OB_NV];                                                                         \
    for (int j = 0; j < OB_NV; j++) bv[j] = OB_(get)(b + p * bs + j * OB_W);                \
    for (int i = 0; i < mr; i++) {                                                          \
      const OB_V av = a[i * ars + p * acs] - (OB_V){0};                                     \
      for (int j = 0; j < OB_NV; j++) acc[i][j] += av * bv[j];                              \
    }                                                                                       \
  }

OB_INLINE OB_V OB_(get)(const OB_T *p) { OB_V v; memcpy(&v, p, sizeof v); return v; }
OB_INLINE void OB_(put)(OB_T *p, OB_V v) { memcpy(p, &v, sizeof v); }

static __attribute__((noinline, unused)) void OB_(put_part)(long m, long n, const OB_T *rows, OB_T *c,
                                                              long crs, int add) {
  for (long i = 0; i < m; i++, c += crs, rows += OB_NR)
    for (long j = 0; j < n; j++) c[j] = add ? c[j] + rows[j] : rows[j];
}

/* mr rows of sums in registers. a: element (i, p) at i*ars + p*acs. b: a panel, or columns of b in place, with bs
 * elements from row to row. */
OB_INLINE void OB_(micro)(const int mr, const int deep, long k, const OB_T *a, long ars, long acs,
                            const OB_T *b, long bs, OB_T *c, long crs, long n, int add) {
  OB_V acc[OB_MR][OB_NV];
  for (int i = 0; i < mr; i++)
    for (int j = 0; j < OB_NV; j++) acc[i][j] = (OB_V){0};
  for (int i = 0; i < mr; i++) __builtin_prefetch(c + i * crs, 1);
  if (deep) {
    _Pragma("GCC unroll 4")
    for (long p = 0; p < k; p++) OB_STEP
  } else {
    for (long p = 0; p < k; p++) OB_STEP
  }
  if (n == OB_NR) {
    for (int i = 0; i < mr; i++)
      for (int j = 0; j < OB_NV; j++) {
        OB_T *at = c + i * crs + j * OB_W;
        OB_(put)(at, add ? acc[i][j] + OB_(get)(at) : acc[i][j]);
      }
  } else {
    OB_T rows[OB_MR * OB_NV * sizeof(OB_V) / sizeof(OB_T)];
    memcpy(rows, acc, (size_t)mr * OB_NV * sizeof(OB_V));
    OB_(put_part)(mr, n, rows, c, crs, add);
  }
}
/* The rows past the last whole block, few at a time. */
static __attribute__((noinline, unused)) void OB_(rest)(long mr, long k, const OB_T *a, long ars, long acs,
                                                        const OB_T *b, long bs, OB_T *c, long crs, long n,
                                                        int add) {
  switch (mr) {
    OB_ROWS_REST
    default: break;
  }
}
/* All rows against one panel of b. Packed rows lie in panels of OB_MR. */
OB_INLINE void OB_(rows)(long m, long k, const OB_T *a, long step, long ars, long acs, const OB_T *b, long bs,
                          OB_T *c, long crs, long n, int add) {
  long i = 0;
  for (; i + OB_MR <= m; i += OB_MR, a += step)
    OB_(micro)(OB_MR, 1, k, a, ars, acs, b, bs, c + i * crs, crs, n, add);
  if (i < m) OB_(rest)(m - i, k, a, ars, acs, b, bs, c + i * crs, crs, n, add);
}
static __attribute__((noinline, unused)) void OB_(packed_rows)(long m, long k, const OB_T *a, const OB_T *b,
                                                                 OB_T *c, long crs, long n, int add) {
  OB_(rows)(m, k, a, OB_MR * k, 1, OB_MR, b, OB_NR, c, crs, n, add);
}
static __attribute__((noinline, unused)) void OB_(strided_rows)(long m, long k, const OB_T *a, long ars,
                                                                const OB_T *b, long bs, OB_T *c, long crs,
                                                                long n, int add) {
  OB_(rows)(m, k, a, OB_MR * ars, ars, 1, b, bs, c, crs, n, add);
}

/* k rows and n columns of b into panels, the last one filled up with zeros. */
static __attribute__((noinline, unused)) void OB_(pack_b)(long k, long n, const OB_T *b, long brs, long bcs,
                                                            OB_T *to) {
  const long whole = n / OB_NR;
  if (bcs == 1) {
    for (long p = 0; p < k; p++)
      for (long j = 0; j < whole; j++)
        for (int v = 0; v < OB_NV; v++)
          OB_(put)(to + (j * k + p) * OB_NR + v * OB_W,
                     OB_(get)(b + p * brs + j * OB_NR + v * OB_W));
  } else {
    for (long j = 0; j < whole; j++)
      for (long p = 0; p < k; p += OB_W)
        for (int l = 0; l < OB_NR; l++) {
          const OB_T *from = b + (j * OB_NR + l) * bcs;
          for (long q = p; q < p + OB_W && q < k; q++)
            to[(j * k + q) * OB_NR + l] = from[q * brs];
        }
  }
  const long left = n - whole * OB_NR;
  if (left)
    for (long p = 0; p < k; p++) {
      OB_T *row = to + (whole * k + p) * OB_NR;
      for (long l = 0; l < left; l++) row[l] = b[p * brs + (whole * OB_NR + l) * bcs];
      for (long l = left; l < OB_NR; l++) row[l] = 0;
    }
}
/* m rows and k columns of a into panels of OB_MR rows; the last panel may have fewer. */
static __attribute__((noinline, unused)) void OB_(pack_a)(long m, long k, const OB_T *a, long ars, long acs,
                                                            OB_T *to) {
  for (long i = 0; i < m; i += OB_MR, to += OB_MR * k, a += OB_MR * ars) {
    if (m - i >= OB_MR) {
      for (long p = 0; p < k; p++)
        for (int l = 0; l < OB_MR; l++) to[p * OB_MR + l] = a[l * ars + p * acs];
    } else {
      for (long l = 0; l < m - i; l++)
        for (long p = 0; p < k; p++) to[p * OB_MR + l] = a[l * ars + p * acs];
    }
  }
}

static __attribute__((unused)) void OB_(packed)(long m, long n, long k, const OB_T *a, long ars, long acs,
                                                const OB_T *b, long brs, long bcs, OB_T *c, long crs, int add,
                                                OB_T *work) {
  const long deep = ob_even(k, OB_KC, 1), wide = ob_even(n, OB_NC, OB_NR);
  const int pack_a = acs != 1 || (n > OB_PACK_COLUMNS && m > OB_MR);
  /* Few rows against short rows of b: copying b costs more than it saves; only a last part of a panel is. */
  const int in_place = bcs == 1 && m <= OB_PLACE_ROWS && brs <= OB_PLACE_STRIDE && !pack_a;
  OB_T *const pb = work, *const pa = work + deep * ob_up(wide, OB_NR);
  for (long j = 0; j < n; j += wide) {
    const long nc = n - j < wide ? n - j : wide, whole = nc / OB_NR * OB_NR;
    for (long p = 0; p < k; p += deep) {
      const long kc = k - p < deep ? k - p : deep;
      const int more = add || p > 0;
      const OB_T *const from = b + p * brs + j * bcs;
      if (!in_place) OB_(pack_b)(kc, nc, from, brs, bcs, pb);
      else if (whole < nc) OB_(pack_b)(kc, nc - whole, from + whole, brs, 1, pb + whole * kc);
      for (long i = 0; i < m; i += OB_MC) {
        const long mc = m - i < OB_MC ? m - i : OB_MC;
        const OB_T *const at = a + i * ars + p * acs;
        if (pack_a) OB_(pack_a)(mc, kc, at, ars, acs, pa);
        for (long q = 0; q < nc; q += OB_NR) {
          const long nr = nc - q < OB_NR ? nc - q : OB_NR;
          const int direct = in_place && q < whole;
          const OB_T *const panel = direct ? from + q : pb + q * kc;
          OB_T *const to = c + i * crs + j + q;
          if (pack_a) OB_(packed_rows)(mc, kc, pa, panel, to, crs, nr, more);
          else OB_(strided_rows)(mc, kc, at, ars, panel, direct ? brs : OB_NR, to, crs, nr, more);
        }
      }
    }
  }
}

/* A few rows of b times their columns of a, added to m rows of sums; whole pairs of vectors. */
OB_INLINE void OB_(stream_step)(const long m, const int rows, long n, const OB_T *a, long ars, long acs,
                                  const OB_T *b, long brs, OB_T *sum, long srs, long ahead, OB_T *x) {
  for (long i = 0; i < m; i++)
    for (int q = 0; q < rows; q++) x[i * rows + q] = a[i * ars + q * acs];
  for (long j = 0; j + 2 * OB_W <= n; j += 2 * OB_W) {
    OB_V b0[OB_SK], b1[OB_SK];
    for (int q = 0; q < rows; q++) {
      b0[q] = OB_(get)(b + q * brs + j);
      b1[q] = OB_(get)(b + q * brs + j + OB_W);
      __builtin_prefetch(b + q * brs + j + ahead);
    }
    OB_T *to = sum + j;
    const OB_T *xs = x;
    for (long i = 0; i < m; i++, to += srs, xs += rows) {
      OB_V s0 = OB_(get)(to), s1 = OB_(get)(to + OB_W);
      for (int q = 0; q < rows; q++) {
        const OB_V xv = xs[q] - (OB_V){0};
        s0 += xv * b0[q];
        s1 += xv * b1[q];
      }
      OB_(put)(to, s0);
      OB_(put)(to + OB_W, s1);
    }
  }
}
/* The columns past the last whole pair of vectors. */
static __attribute__((noinline, unused)) void OB_(stream_tail)(long m, long n, long k, const OB_T *a, long ars,
                                                                 long acs, const OB_T *b, long brs, OB_T *sum,
                                                                 long srs) {
  for (long i = 0; i < m; i++)
    for (long l = 0; l < n; l++) {
      OB_T s = 0;
      for (long p = 0; p < k; p++) s += a[i * ars + p * acs] * b[p * brs + l];
      sum[i * srs + l] = s;
    }
}
static __attribute__((noinline, unused)) void OB_(streamed)(long m, long n, long k, const OB_T *a, long ars,
                                                              long acs, const OB_T *b, long brs, OB_T *c,
                                                              long crs, int add, OB_T *work) {
  OB_T *const sums = work + ob_up(m * OB_SK, OB_GAP);
  const long wide = ob_even(n, OB_SUMS / m, 2 * OB_W), srs = wide + OB_GAP;
  for (long j = 0; j < n; j += wide) {
    const long nc = n - j < wide ? n - j : wide, whole = nc / (2 * OB_W) * (2 * OB_W);
    for (long i = 0; i < m; i++) memset(sums + i * srs, 0, (size_t)nc * sizeof(OB_T));
    long p = 0;
    for (; p + OB_SK <= k; p += OB_SK)
      OB_(stream_step)(m, OB_SK, whole, a + p * acs, ars, acs, b + p * brs + j, brs, sums, srs,
                         p + OB_AHEAD + OB_SK <= k ? OB_AHEAD * brs : 0, work);
    if (p + 4 <= k) {
      OB_(stream_step)(m, 4, whole, a + p * acs, ars, acs, b + p * brs + j, brs, sums, srs, 0, work);
      p += 4;
    }
    for (; p < k; p++)
      OB_(stream_step)(m, 1, whole, a + p * acs, ars, acs, b + p * brs + j, brs, sums, srs, 0, work);
    if (whole < nc)
      OB_(stream_tail)(m, nc - whole, k, a, ars, acs, b + j + whole, brs, sums + whole, srs);
    for (long i = 0; i < m; i++) {
      OB_T *const to = c + i * crs + j;
      const OB_T *const from = sums + i * srs;
      if (add) for (long l = 0; l < nc; l++) to[l] += from[l];
      else memcpy(to, from, (size_t)nc * sizeof(OB_T));
    }
  }
}

static __attribute__((noinline, unused)) void OB_(product)(
    long m, long n, long k, const OB_T *a, long ars, long acs, const OB_T *b, long brs, long bcs, OB_T *c, long crs,
    int add, OB_T *work) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!add)
      for (long i = 0; i < m; i++) memset(c + i * crs, 0, (size_t)n * sizeof(OB_T));
  } else if (m <= OB_STREAM_ROWS && n >= OB_STREAM_COLUMNS && bcs == 1) {
    OB_(streamed)(m, n, k, a, ars, acs, b, brs, c, crs, add, work);
  } else {
    OB_(packed)(m, n, k, a, ars, acs, b, brs, bcs, c, crs, add, work);
  }
}

#undef OB_STEP
#undef OB_W
#undef OB_NR
