"""The store behaves as a dictionary on disk, whatever the order of operations.

Random sequences of put, get, remove, verify and reopening against a plain dict; artefacts that no
entry needs are gone after a removal, all others are there with the right bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from obelisk.cache import CacheKey, Store

KEYS = st.integers(0, 5)
PAYLOADS = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    max_size=3,
)
FILES = st.dictionaries(
    st.sampled_from(["kernel.so", "graph.txt", "report.html"]), st.binary(max_size=20), max_size=2
)


def key(n: int) -> CacheKey:
    """One of a few keys."""
    return CacheKey(f"program{n}", "s", "60s", "m", "cc", "1", "tested", "cpu")


class Model(RuleBasedStateMachine):
    """A store and the dictionary that it should be."""

    @initialize()
    def start(self) -> None:
        """An empty folder."""
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store.open(Path(self.folder.name))
        self.right: dict[int, tuple[dict[str, object], dict[str, bytes]]] = {}

    @rule(n=KEYS, payload=PAYLOADS, files=FILES)
    def put(self, n: int, payload: dict[str, object], files: dict[str, bytes]) -> None:
        """New or again."""
        assert self.store.put(key(n), payload, files, name=f"n{n}") is not None
        self.right[n] = (payload, files)

    @rule(n=KEYS)
    def get(self, n: int) -> None:
        """Exactly what was put last."""
        entry = self.store.get(key(n))
        if n not in self.right:
            assert entry is None
            return
        assert entry is not None
        payload, files = self.right[n]
        assert entry.payload == payload
        assert {k: p.read_bytes() for k, p in entry.artefacts.items()} == files

    @rule(n=KEYS)
    def remove(self, n: int) -> None:
        """One entry, and with it the files nobody needs."""
        if n in self.right:
            assert self.store.remove(key(n).digest) == 1
            del self.right[n]
            needed = {(k.split(".")[1], b) for _, f in self.right.values() for k, b in f.items()}
            assert len(list(self.store.objects.all())) == len(needed)

    @rule()
    def remove_all(self) -> None:
        """Everything."""
        assert self.store.remove() == len(self.right)
        self.right.clear()
        assert list(self.store.objects.all()) == []

    @rule()
    def reopen(self) -> None:
        """As another process would."""
        self.store = Store.open(Path(self.folder.name))

    @invariant()
    def listing_and_check_agree(self) -> None:
        """No more, no less, and all sound."""
        if hasattr(self, "store"):
            assert {s.name for s in self.store.list()} == {f"n{n}" for n in self.right}
            checked = self.store.verify()
            assert (checked.entries, checked.problems) == (len(self.right), ())

    def teardown(self) -> None:
        """Clear up."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestStore = Model.TestCase
TestStore.settings = settings(max_examples=10, stateful_step_count=10, deadline=None)
