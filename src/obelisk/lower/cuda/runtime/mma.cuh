// Matrix fragments of a warp: ldmatrix, mma, and pairs of 16-bit floats in a register.
// Fragment values are f32 arrays v[rows][columns] in the order of the mma instruction's results:
// row r of a lane is (r / 2) * 16 + (r % 2) * 8 + lane / 4, column q is (q / 2) * 8 + lane % 4 * 2 + q % 2.

OB_DEVICE void ob_ldmatrix(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
OB_DEVICE void ob_load16(unsigned (&r)[4], unsigned at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
OB_DEVICE void ob_ldmatrix_t(unsigned (&r)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// The reverse of ob_ldmatrix: four blocks of 8 by 8, lane l gives the address of row l % 8 of block l / 8.
OB_DEVICE void ob_stmatrix(unsigned at, const unsigned (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const unsigned lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned to = __shfl_sync(0xffffffffu, at, i * 8 + (lane >> 2)) + (lane & 3) * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(r[i]) : "memory");
  }
#endif
}

OB_DEVICE void ob_mma(ob_f16, float &c0, float &c1, float &c2, float &c3, const unsigned (&a)[4], unsigned b0,
                      unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
OB_DEVICE void ob_mma(ob_bf16, float &c0, float &c1, float &c2, float &c3, const unsigned (&a)[4], unsigned b0,
                      unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Products of two halves each.
OB_DEVICE unsigned ob_times(unsigned a, unsigned b) {
  unsigned r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Two f32 values as one register of two 16-bit floats, and back; the first is in the low half.
OB_DEVICE unsigned ob_pack(ob_f16, float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
OB_DEVICE unsigned ob_pack(ob_bf16, float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
OB_DEVICE void ob_unpack(ob_f16, unsigned v, float &low, float &high) {
  asm("{.reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(v));
}
OB_DEVICE void ob_unpack(ob_bf16, unsigned v, float &low, float &high) {
  low = __uint_as_float(v << 16);
  high = __uint_as_float(v & 0xffff0000u);
}
