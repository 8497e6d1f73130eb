/* Matrix products on strided operands of one compute type, in register blocks of OB_MR rows and OB_NV vectors.
 *
 * OB_PRODUCT(S, T, V) defines ob_product_S. The right operand is packed into panels of OB_MR.. columns, OB_KC deep,
 * in `work`, so that the innermost loop reads it in order; the left one is read through its strides. c is row-major
 * with unit column stride. `add` adds to c, else c is overwritten (also where the depth is 0).
 */
#define OB_PRODUCT(S, T, V)                                                                                   \
  enum { ob_lanes_##S = sizeof(V) / sizeof(T), ob_nr_##S = OB_NV * ob_lanes_##S };                            \
  OB_INLINE void ob_micro_##S(const int mr, long k, const T *a, long ars, long acs, const T *b, T *c,         \
                              long crs, long n, int add) {                                                    \
    V acc[OB_MR][OB_NV];                                                                                      \
    for (int i = 0; i < mr; i++)                                                                              \
      for (int j = 0; j < OB_NV; j++) acc[i][j] = (V){0};                                                     \
    for (long p = 0; p < k; p++) {                                                                            \
      V bv[OB_NV];                                                                                            \
      for (int j = 0; j < OB_NV; j++) memcpy(&bv[j], b + p * ob_nr_##S + j * ob_lanes_##S, sizeof(V));        \
      for (int i = 0; i < mr; i++) {                                                                          \
        V av = a[i * ars + p * acs] - (V){0};                                                                 \
        for (int j = 0; j < OB_NV; j++) acc[i][j] += av * bv[j];                                              \
      }                                                                                                       \
    }                                                                                                         \
    for (int i = 0; i < mr; i++) {                                                                            \
      if (n == ob_nr_##S) {                                                                                   \
        for (int j = 0; j < OB_NV; j++) {                                                                     \
          V v = acc[i][j], o;                                                                                 \
          T *at = c + i * crs + j * ob_lanes_##S;                                                             \
          if (add) { memcpy(&o, at, sizeof o); v += o; }                                                      \
          memcpy(at, &v, sizeof v);                                                                           \
        }                                                                                                     \
      } else {                                                                                                \
        T row[OB_NV * sizeof(V) / sizeof(T)];                                                                 \
        memcpy(row, acc[i], sizeof row);                                                                      \
        for (long j = 0; j < n; j++) c[i * crs + j] = add ? c[i * crs + j] + row[j] : row[j];                 \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  static __attribute__((noinline, unused)) void ob_rows_##S(long m, long k, const T *a, long ars, long acs,   \
                                                            const T *b, T *c, long crs, long n, int add) {    \
    long i = 0;                                                                                               \
    for (; i + OB_MR <= m; i += OB_MR)                                                                        \
      ob_micro_##S(OB_MR, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add);                             \
    switch (m - i) {                                                                                          \
      case 5: ob_micro_##S(5, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add); break;                  \
      case 4: ob_micro_##S(4, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add); break;                  \
      case 3: ob_micro_##S(3, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add); break;                  \
      case 2: ob_micro_##S(2, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add); break;                  \
      case 1: ob_micro_##S(1, k, a + i * ars, ars, acs, b, c + i * crs, crs, n, add); break;                  \
      default: break;                                                                                         \
    }                                                                                                         \
  }                                                                                                           \
  static __attribute__((unused)) void ob_product_##S(long m, long n, long k, const T *a, long ars, long acs,  \
                                                     const T *b, long brs, long bcs, T *c, long crs, int add, \
                                                     T *work) {                                               \
    if (k == 0 && !add)                                                                                       \
      for (long i = 0; i < m; i++) memset(c + i * crs, 0, (size_t)n * sizeof(T));                             \
    for (long p = 0; p < k; p += OB_KC) {                                                                     \
      const long kc = k - p < OB_KC ? k - p : OB_KC;                                                          \
      for (long j = 0; j < n; j += ob_nr_##S) {                                                               \
        const long nr = n - j < ob_nr_##S ? n - j : ob_nr_##S;                                                \
        const T *from = b + p * brs + j * bcs;                                                                \
        for (long q = 0; q < kc; q++) {                                                                       \
          T *to = work + q * ob_nr_##S;                                                                       \
          for (long l = 0; l < nr; l++) to[l] = from[q * brs + l * bcs];                                      \
          for (long l = nr; l < ob_nr_##S; l++) to[l] = 0;                                                    \
        }                                                                                                     \
        ob_rows_##S(m, kc, a + p * acs, ars, acs, work, c + j, crs, nr, add || p > 0);                        \
      }                                                                                                       \
    }                                                                                                         \
  }
