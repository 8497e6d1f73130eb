"""The store (REPORTS R38): what is put comes back; damage is a miss and a warning, not an error.

Proves round trips, repair of truncated, zeroed, bit-flipped, empty and foreign files, entries of
another schema, folders that cannot be written, and writers in four processes at once.
"""

from __future__ import annotations

import enum
import json
import logging
import multiprocessing
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from obelisk.base.errors import CacheCorrupt, UnknownName, UserError
from obelisk.cache import CacheKey, Store, store
from obelisk.cache.objects import sha256

KEY = CacheKey("p" * 24, "space", "60s", "m" * 24, "cc 12.2", "0.1.0", "tested", "cpu")
PAYLOAD = {"verdict": "proved", "times": [1.5e-6, 2.0], "graph": {"text": "y = x @ w"}}
LIBRARY = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _records(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("obelisk"), "propagate", True)
    caplog.set_level(logging.WARNING)


def filled(folder: Path, count: int = 30) -> Store:
    """A store with `count` entries, the first of them KEY's."""
    out = Store.open(folder)
    out.put(KEY, PAYLOAD, {"kernel.so": LIBRARY, "graph.txt": b"y = x @ w"}, "gated_mlp")
    for i in range(1, count):
        out.put(replace(KEY, program=f"program{i}"), {"i": i, "pad": "x" * 500}, {}, f"p{i}")
    return out


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    """Payload, name and artefacts, also through a second store on the same folder."""
    filled(tmp_path)
    entry = Store.open(tmp_path).get(KEY)
    assert entry is not None
    assert (entry.key, entry.name, entry.payload) == (KEY, "gated_mlp", PAYLOAD)
    assert entry.artefacts["kernel.so"].read_bytes() == LIBRARY
    assert entry.artefacts["kernel.so"].suffix == ".so"
    assert entry.artefacts["graph.txt"].read_text() == "y = x @ w"
    assert Store.open(tmp_path).get(replace(KEY, device="cuda:0")) is None


def test_a_second_put_replaces_the_first(tmp_path: Path) -> None:
    """One entry per key, the newest."""
    one = Store.open(tmp_path)
    one.put(KEY, {"n": 1})
    two = one.put(KEY, {"n": 2})
    assert two is not None
    assert two.payload == {"n": 2}
    assert len(one.list()) == 1


def test_listing_showing_and_removing_by_prefix(tmp_path: Path) -> None:
    """Newest first; a prefix must fit one entry; removing clears files that nobody needs."""
    one = filled(tmp_path, 5)
    listed = one.list()
    assert [s.name for s in listed] == ["p4", "p3", "p2", "p1", "gated_mlp"]
    assert listed[-1].nbytes == len(LIBRARY) + 9 + len(
        json.dumps(PAYLOAD, sort_keys=True, separators=(",", ":"))
    )
    assert one.show(KEY.digest[:10]).payload == PAYLOAD
    with pytest.raises(UnknownName, match="5 entries"):
        one.show("zz")
    with pytest.raises(UnknownName, match="fits 5"):
        one.remove("")
    assert len(list(one.objects.all())) == 2
    assert one.remove(KEY.digest[:10]) == 1
    assert one.get(KEY) is None
    assert list(one.objects.all()) == []
    assert one.remove() == 4
    assert one.list() == ()


def test_shared_artefacts_survive_until_the_last_entry_goes(tmp_path: Path) -> None:
    """Content addressing: two entries, one file."""
    one, other = Store.open(tmp_path), replace(KEY, space="other")
    one.put(KEY, {}, {"a.so": LIBRARY})
    one.put(other, {}, {"b.so": LIBRARY})
    assert len(list(one.objects.all())) == 1
    one.remove(KEY.digest)
    entry = one.get(other)
    assert entry is not None
    assert entry.artefacts["b.so"].read_bytes() == LIBRARY


def test_artefacts_may_be_files(tmp_path: Path) -> None:
    """A path is read when it is put."""
    source = tmp_path / "built.so"
    source.write_bytes(LIBRARY)
    entry = Store.open(tmp_path / "cache").put(KEY, {}, {"kernel.so": source})
    source.unlink()
    assert entry is not None
    assert entry.artefacts["kernel.so"].read_bytes() == LIBRARY


class Word(enum.Enum):
    """A verdict as an enum."""

    YES = 1


class Number(enum.IntEnum):
    """An enum that JSON would write as a number."""

    YES = 1


@pytest.mark.parametrize("value", [{"v": Word.YES}, {"v": [Number.YES]}, {"v": {1, 2}}])
def test_only_json_and_no_enum_numbers(tmp_path: Path, value: dict[str, object]) -> None:
    """R38's first fault: numbers of an enum that moves."""
    with pytest.raises(UserError, match="cache payload"):
        Store.open(tmp_path).put(KEY, value)


def _truncate(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def _zero_half(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": _truncate,
    "header only": lambda data: data[:100],
    "empty": lambda data: b"",
    "zeroed": lambda data: bytes(len(data)),
    "second half zeroed": _zero_half,
    "text": lambda data: b"this is somebody's diary\n" * 50,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("when", ["before open", "after open"])
def test_a_damaged_file_is_reported_moved_aside_and_made_anew(
    tmp_path: Path, kind: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A miss, not an error; the warning names the path; nothing is deleted; puts work again."""
    one = filled(tmp_path)
    damaged = DAMAGE[kind](one.file.read_bytes())
    one.file.write_bytes(damaged)
    again = Store.open(tmp_path) if when == "before open" else one
    got = again.get(KEY)
    assert got is None or got.payload == PAYLOAD
    checked = again.verify()
    assert str(again.file) in caplog.text
    aside = list(tmp_path.glob("*.corrupt"))
    assert len(aside) == 1
    assert aside[0].read_bytes()[: len(damaged) // 2] == damaged[: len(damaged) // 2]
    assert checked.entries == 0
    assert again.put(KEY, PAYLOAD) is not None
    entry = Store.open(tmp_path).get(KEY)
    assert entry is not None
    assert entry.payload == PAYLOAD


def test_a_database_of_another_program_is_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Foreign SQLite: its rows are not ours to write into or to delete."""
    with sqlite3.connect(tmp_path / store.FILE) as db:
        db.execute("create table entries (diary text)")
        db.execute("insert into entries values ('dear diary')")
    one = Store.open(tmp_path)
    assert "another program" in caplog.text
    assert one.put(KEY, PAYLOAD) is not None
    with sqlite3.connect(next(tmp_path.glob("*.corrupt"))) as db:
        assert db.execute("select diary from entries").fetchall() == [("dear diary",)]


def test_two_hundred_bit_flips_never_give_a_wrong_answer(tmp_path: Path) -> None:
    """Anywhere in the file: each entry read afterwards is either right or a miss."""
    original = filled(tmp_path / "a", 12)
    data = original.file.read_bytes()
    keys = [KEY] + [replace(KEY, program=f"program{i}") for i in range(1, 12)]
    expected = {k: e.payload for k in keys if (e := original.get(k)) is not None}
    assert len(expected) == 12
    rng = random.Random(1)
    hits = 0
    for trial in range(200):
        folder = tmp_path / f"b{trial}"
        folder.mkdir()
        flipped = bytearray(data)
        at = rng.randrange(len(flipped) * 8)
        flipped[at // 8] ^= 1 << (at % 8)
        (folder / store.FILE).write_bytes(flipped)
        one = Store.open(folder)
        for key in rng.sample(keys[1:], 3):
            entry = one.get(key)
            if entry is not None:
                hits += 1
                assert entry.payload == expected[key]
    assert hits > 100, "most flips hit something else"


@pytest.mark.parametrize("kind", ["truncated", "empty", "zeroed", "missing", "flipped"])
def test_a_damaged_artefact_is_a_miss(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the file; verify reports it; a new put heals it and keeps the old bytes."""
    one = filled(tmp_path, 2)
    target = one.objects.path(sha256(LIBRARY), ".so")
    changed = {
        "truncated": LIBRARY[:100], "empty": b"", "zeroed": bytes(len(LIBRARY)),
        "flipped": LIBRARY[:77] + b"\xff" + LIBRARY[78:], "missing": None,
    }[kind]  # fmt: skip
    if changed is None:
        target.unlink()
    else:
        target.write_bytes(changed)
    assert one.get(KEY) is None
    assert str(target) in caplog.text
    (problem,) = one.verify().problems
    assert str(target) in problem
    with pytest.raises(CacheCorrupt, match="objects"):
        one.show(KEY.digest)
    assert one.put(KEY, PAYLOAD, {"kernel.so": LIBRARY}) is not None
    assert one.verify().problems == ()
    assert len(list(target.parent.glob("*.corrupt"))) == (changed is not None)


def test_a_changed_row_is_a_miss_and_named_by_verify(tmp_path: Path) -> None:
    """A sound file with a wrong row: the checksum catches it."""
    one = filled(tmp_path, 3)
    with sqlite3.connect(one.file) as db:
        db.execute("update entries set payload = '{\"i\":7}' where name = 'p1'")
    assert one.get(replace(KEY, program="program1")) is None
    assert one.get(replace(KEY, program="program2")) is not None
    (problem,) = one.verify().problems
    assert replace(KEY, program="program1").digest in problem


def test_an_entry_of_the_next_schema_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by a newer version: a miss here, and still there for the newer version."""
    one = Store.open(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(store, "ENTRY_SCHEMA", store.ENTRY_SCHEMA + 1)
        one.put(KEY, PAYLOAD)
    assert one.get(KEY) is None
    assert f"schema {store.ENTRY_SCHEMA + 1}" in caplog.text
    assert [s.schema for s in one.list()] == [store.ENTRY_SCHEMA + 1]
    assert f"schema {store.ENTRY_SCHEMA + 1}" in one.verify().problems[0]
    with pytest.raises(UnknownName, match="another version"):
        one.show(KEY.digest)
    monkeypatch.setattr(store, "ENTRY_SCHEMA", store.ENTRY_SCHEMA + 1)
    assert one.get(KEY) is not None


def test_a_folder_that_cannot_be_made_means_no_caching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the path; everything else answers as an empty store."""
    (tmp_path / "file").write_text("in the way")
    one = Store.open(tmp_path / "file" / "cache")
    assert not one.writable
    assert str(tmp_path / "file" / "cache") in caplog.text
    assert one.put(KEY, PAYLOAD, {"kernel.so": LIBRARY}) is None
    assert one.get(KEY) is None
    assert one.list() == ()
    assert one.remove() == 0
    assert one.verify().entries == 0
    assert len(caplog.records) == 1


def test_a_read_only_folder_can_still_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is used; nothing is written."""
    filled(tmp_path, 3)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(store, "folder_lock", refused)
    one = Store.open(tmp_path)
    assert "Permission denied" in caplog.text
    entry = one.get(KEY)
    assert entry is not None
    assert entry.payload == PAYLOAD
    assert one.put(replace(KEY, space="new"), PAYLOAD) is None
    assert len(one.list()) == 3
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    """Somebody cleared the cache directory while we ran."""
    one = filled(tmp_path / "c", 2)
    for p in sorted((tmp_path / "c").rglob("*"), reverse=True):
        p.rmdir() if p.is_dir() else p.unlink()
    (tmp_path / "c").rmdir()
    assert one.get(KEY) is None
    assert one.put(KEY, PAYLOAD) is not None


def _write_many(folder: str, who: int, start: object) -> None:
    one = Store.open(Path(folder))
    for i in range(25):
        shared, own = replace(KEY, space=f"shared{i}"), replace(KEY, space=f"own{who}-{i}")
        one.put(shared, {"i": i}, {"kernel.so": b"%d" % i * 1000})
        one.put(own, {"who": who, "i": i}, {"kernel.so": b"%d-%d" % (who, i) * 500})
        got = one.get(shared)
        assert got is not None
        assert got.payload == {"i": i}
        assert one.get(own) is not None


@pytest.mark.parametrize("damaged", [False, True])
def test_four_processes_at_once(tmp_path: Path, damaged: bool) -> None:
    """All entries of all writers are there and sound, also when they all find a damaged file."""
    if damaged:
        (tmp_path / store.FILE).write_bytes(b"no database" * 100)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_many, args=(str(tmp_path), who, None)) for who in range(4)
    ]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    assert [w.exitcode for w in writers] == [0] * 4
    one = Store.open(tmp_path)
    checked = one.verify()
    assert (checked.entries, checked.problems, checked.orphans) == (125, (), ())
    assert len(list(tmp_path.glob("*.corrupt"))) == damaged
