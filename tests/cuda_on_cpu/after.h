/* The kernel's ends of `twin_run`. */
void twin_enter(int block) {
  twin_mine = &twin_blocks[block];
  om_memory = twin_mine->memory;
  om_p = (om_shared *)(om_memory + TWIN_SHARED);
  om_ranks_p = (om_rank *)(om_memory + TWIN_SHARED + ((sizeof(om_shared) + 63) / 64) * 64);
}
void twin_body() {
  obelisk_mega(*(const om_launch *)twin_launch);
  twin_fibers[twin_now].done = true;
  twin_yield();
  abort();
}
