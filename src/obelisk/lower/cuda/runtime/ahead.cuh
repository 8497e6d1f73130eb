// Until LEFT groups of products by four warps are under way: the next iteration's first, begun in front
// of this one's final product, is complete while that runs on.
template <int LEFT> OB_DEVICE void ob_wgmma_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// What stands in front is computed in front of the wait that follows. Otherwise the assembler moves that
// wait up to the last product, in front of the exponentials that shall run beside it; over a branch it
// does not. The branch is never taken (a lane's own bit is set in its mask), and not dropped, as sleeping
// is an effect. With bulk copies a second look at a tile's barrier does the same.
OB_DEVICE void ob_wgmma_beside() {
  unsigned mask;
  asm volatile(
      "{\n.reg .pred never;\nagain:\nmov.u32 %0, %%lanemask_eq;\nsetp.eq.u32 never, %0, 0;\n"
      "@never nanosleep.u32 1;\n@never bra again;\n}"
      : "=r"(mask)::"memory");
}
