"""Content-addressed, versioned, atomic store of results on disk.

`cache_key` makes the key from everything that changes the answer; `Store.open` gives the store.
Damage is a miss with a warning, never an exception; see docs/cache.md.
"""

from obelisk.cache.key import CacheKey, budget_class, cache_key
from obelisk.cache.store import Checked, Entry, Store, Summary

__all__ = ["CacheKey", "Checked", "Entry", "Store", "Summary", "budget_class", "cache_key"]
