"""The store: results by key in one SQLite file, binary artefacts in files beside it.

Takes a folder; gives `Store`. It promises that a result that does not check out is never returned:
damage of any kind is a miss, a warning that names the path, and a file moved aside (`*.corrupt`),
never an exception and never a silent deletion. A folder that cannot be written means no caching,
with a warning. Safe with several processes at once.
"""

from __future__ import annotations

import enum
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from obelisk.base.errors import CacheCorrupt, UnknownName, UserError
from obelisk.base.log import logger
from obelisk.base.settings import settings
from obelisk.cache.key import CacheKey
from obelisk.cache.lock import folder_lock
from obelisk.cache.objects import Objects, sha256

ENTRY_SCHEMA = 1  # of a payload; entries of another number are ignored
LAYOUT = 1  # of the tables; part of the file's name, so versions do not fight over one file
APPLICATION_ID = 0x0BE115C  # in the header of every file of ours
FILE = f"results-{LAYOUT}.sqlite"
_BUSY_SECONDS = 20.0
_TABLES = (
    "create table entries (digest text primary key, schema integer not null, name text not null,"
    " created real not null, key text not null, payload text not null, artefacts text not null,"
    " sha256 text not null) without rowid"
)
_COLUMNS = "digest, schema, name, created, key, payload, artefacts, sha256"
# What SQLite says of a file whose bytes are not what they were; "no such table" is a plain ERROR.
_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_FORMAT,
    }
)  # fmt: skip
T = TypeVar("T")
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored result.

    Attributes:
        key: what it answers.
        name: the program's name, for people.
        created: seconds since 1970.
        payload: the JSON object that was put.
        artefacts: path of each artefact by its name; each was read and matches its digest.
    """

    key: CacheKey
    name: str
    created: float
    payload: Mapping[str, Any]
    artefacts: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of a listing.

    Attributes:
        digest: of the key.
        name: the program's name.
        created: seconds since 1970.
        nbytes: of payload and artefacts.
        schema: of the entry.
    """

    digest: str
    name: str
    created: float
    nbytes: int
    schema: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What `Store.verify` found.

    Attributes:
        entries: how many were read.
        problems: one sentence each, with the digest or path.
        orphans: stored files that no entry needs (`remove` clears them).
    """

    entries: int
    problems: tuple[str, ...]
    orphans: tuple[Path, ...]


class Store:
    """Results on disk. Every method opens its own connection, so threads and forks may share one.

    Attributes:
        folder, file: where it lies.
        writable: False when nothing can be stored; what is there may still be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / FILE
        self.objects = Objects(folder)
        self.writable = True
        self._log = logger("cache")

    @staticmethod
    def open(folder: Path | None = None) -> Store:
        """The store in `folder` (default: the settings' cache directory), made or repaired."""
        store = Store(folder if folder is not None else settings().cache_dir)
        store._repair("", locked=False)
        return store

    def get(self, key: CacheKey) -> Entry | None:
        """The result for this key, or None. What cannot be trusted is a miss, with a warning."""
        row = self._read(lambda db: _row(db, key.digest))
        if row is None:
            return None
        try:
            entry = self._entry(row)
            if entry is not None and entry.key != key:
                raise CacheCorrupt(f"{self.file}: entry {key.digest} belongs to another key")
            return entry
        except CacheCorrupt as e:
            self._log.warning("%s; it counts as a miss and will be made again", e)
            return None

    def put(
        self,
        key: CacheKey,
        payload: Mapping[str, Any],
        artefacts: Mapping[str, bytes | Path] | None = None,
        name: str = "",
    ) -> Entry | None:
        """Store a result in one transaction, replacing an older one; gives it as `get` would.

        `payload` must be JSON, with enum members by name. `artefacts` are bytes or files by name;
        the name's suffix is kept (`kernel.so`). None (and a warning) when it cannot be stored.
        Raises `UserError` for a payload that is no JSON or holds an enum member, and `OSError` for
        an artefact file that cannot be read.
        """
        text = _json_text(payload)
        blobs = {
            k: v if isinstance(v, bytes) else v.read_bytes() for k, v in (artefacts or {}).items()
        }
        if not self.writable:
            return None
        try:
            with self._lock():
                stored = {
                    k: [self.objects.put(b, Path(k).suffix), len(b)] for k, b in blobs.items()
                }
                key_text, stored_text = _json_text(key.to_json()), _json_text(stored)
                row = (key.digest, ENTRY_SCHEMA, name, time.time(), key_text, text, stored_text)
                self._guarded(lambda db: _insert(db, (*row, _checksum(row))), locked=True)
        except OSError as e:
            self._give_up(e)
            return None
        return self.get(key)

    def list(self) -> tuple[Summary, ...]:
        """All entries, newest first."""
        found = [s for r in self._rows() if (s := self._summary(r)) is not None]
        return tuple(sorted(found, key=lambda s: (-s.created, s.digest)))

    def show(self, prefix: str) -> Entry:
        """The entry whose digest starts so.

        Raises `UnknownName` when the prefix fits none or several, or the entry is of another
        schema, and `CacheCorrupt` when it is damaged.
        """
        digest = self._unique(prefix)
        row = self._read(lambda db: _row(db, digest))
        entry = self._entry(row) if row is not None else None
        if entry is None:
            raise UnknownName(f"cache entry {digest} was made by another version of Obelisk")
        return entry

    def remove(self, prefix: str | None = None) -> int:
        """Remove the entry whose digest starts so, or all for None, and files nobody needs then.

        Returns how many entries went; raises `UnknownName` when the prefix fits none or several.
        """
        digest = None if prefix is None else self._unique(prefix)
        if not self.writable:
            return 0
        try:
            with self._lock():
                gone = self._guarded(lambda db: _delete(db, digest), locked=True)
                for path in self._orphans():
                    path.unlink(missing_ok=True)
        except OSError as e:
            self._give_up(e)
            return 0
        return gone or 0

    def verify(self) -> Checked:
        """Re-read everything: the file's structure, each entry's checksum, each artefact."""
        problems: list[str] = []

        def look(db: sqlite3.Connection) -> Sequence[Row]:
            lines = [_text(line) for (line,) in db.execute("pragma integrity_check")]
            if lines != ["ok"]:
                raise _Damaged("; ".join(lines[:3]))
            return db.execute(f"select {_COLUMNS} from entries").fetchall()

        before = _inode(self.file)
        rows = self._read(look) or []
        if self.writable and _inode(self.file) != before:
            problems.append(f"{self.file} was damaged and has been made anew")
        for row in rows:
            try:
                if self._entry(row) is None:
                    problems.append(
                        f"entry {_text(row[0])} has schema {row[1]}, expected {ENTRY_SCHEMA}"
                    )
            except CacheCorrupt as e:
                problems.append(str(e))
        return Checked(len(rows), tuple(problems), self._orphans())

    # --- rows ---

    def _rows(self) -> Sequence[Row]:
        return self._read(lambda db: db.execute(f"select {_COLUMNS} from entries").fetchall()) or ()

    def _entry(self, row: Row) -> Entry | None:
        """The entry of a row; None (with a warning) for another schema; or `CacheCorrupt`."""
        digest = _text(row[0])
        if isinstance(row[1], int) and row[1] != ENTRY_SCHEMA:
            self._log.warning(
                "%s: entry %s has schema %d, this version reads %d; it is ignored",
                self.file, digest, row[1], ENTRY_SCHEMA,
            )  # fmt: skip
            return None
        if _checksum(row[:7]) != _text(row[7]):
            raise CacheCorrupt(f"{self.file}: entry {digest} does not match its checksum")
        try:
            files = {name: sha for name, (sha, _) in json.loads(row[6]).items()}
            paths = {n: self.objects.check(sha, Path(n).suffix) for n, sha in files.items()}
            key = CacheKey.from_json(json.loads(row[4]))
            return Entry(key, _text(row[2]), float(row[3]), json.loads(row[5]), paths)
        except (ValueError, TypeError, AttributeError) as e:
            raise CacheCorrupt(f"{self.file}: entry {digest} does not read back: {e}") from e

    def _summary(self, row: Row) -> Summary | None:
        try:
            files = sum(size for _, size in json.loads(row[6]).values())
            nbytes = len(row[5]) + files
            return Summary(_text(row[0]), _text(row[2]), float(row[3]), nbytes, int(row[1]))
        except (ValueError, TypeError, AttributeError) as e:
            self._log.warning("%s: entry %s is damaged (%s)", self.file, _text(row[0]), e)
            return None

    def _unique(self, prefix: str) -> str:
        names = [_text(r[0]) for r in self._rows()]
        found = sorted(n for n in names if n.startswith(prefix))
        if len(found) == 1:
            return found[0]
        if not found:
            raise UnknownName(f"no cache entry starts with {prefix!r}, of {len(names)} entries")
        raise UnknownName(f"{prefix!r} fits {len(found)} cache entries: {', '.join(found[:5])}")

    def _orphans(self) -> tuple[Path, ...]:
        """Stored files that no entry names. A damaged entry's files may be among them."""
        used: set[str] = set()
        for row in self._rows():
            try:
                used |= {sha + Path(name).suffix for name, (sha, _) in json.loads(row[6]).items()}
            except (ValueError, TypeError, AttributeError):
                continue
        return tuple(p for p in self.objects.all() if p.name not in used)

    # --- the file ---

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder):
            yield

    def _read(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        if not self.writable and not self.file.is_file():
            return None
        return self._guarded(action, locked=False)

    def _guarded(self, action: Callable[[sqlite3.Connection], T], locked: bool) -> T | None:
        """Run an action on a connection; on damage make the file anew and run it once more."""
        for again in (False, True):
            try:
                with self._connection() as db:
                    return action(db)
            except (sqlite3.Error, UnicodeError) as e:
                mendable = _is_damage(e) or not self.file.exists()
                if again or not mendable or not self.writable:
                    self._log.warning("%s: %s; going on without it", self.file, e)
                    return None
                self._repair(str(e), locked)
        return None

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        mode = "mode=rw" if self.writable else "immutable=1"
        uri = f"{self.file.absolute().as_uri()}?{mode}"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as db:
            db.text_factory = bytes  # damaged text must reach the checksum, not fail in decoding
            with db:
                yield db

    def _repair(self, why: str, locked: bool) -> None:
        try:
            with nullcontext() if locked else self._lock():
                self._make_sound(why)
        except OSError as e:
            self._give_up(e)

    def _make_sound(self, why: str) -> None:
        """Under the lock: see to a sound file of ours. Another process may have been faster."""
        problem = self._problem(thorough=bool(why))
        if problem is None:
            return
        if problem:
            aside = _move_aside(self.file)
            self._log.warning(
                "%s: %s; it was moved to %s and an empty store made", self.file, problem, aside.name
            )
        fresh = self.file.with_name(f".new-{FILE}")
        fresh.unlink(missing_ok=True)
        with closing(sqlite3.connect(fresh)) as db:
            db.execute(f"pragma application_id = {APPLICATION_ID}")
            db.execute(f"pragma user_version = {LAYOUT}")
            db.execute(_TABLES)
            db.commit()
            db.execute("pragma journal_mode = wal")
        os.replace(fresh, self.file)

    def _problem(self, thorough: bool) -> str | None:
        """What is wrong with the file: None when it is sound, "" when there is none."""
        if not self.file.exists():
            return ""
        if not self.file.is_file():
            return "it is no file"
        with self.file.open("rb") as f:
            if f.read(16) != b"SQLite format 3\x00":
                return "it is no SQLite file" if self.file.stat().st_size else "it is empty"
        try:
            with self._connection() as db:
                if db.execute("pragma application_id").fetchone()[0] != APPLICATION_ID:
                    return "it is an SQLite file of another program"
                layout = db.execute("pragma user_version").fetchone()[0]
                if layout != LAYOUT:
                    return f"its layout is {layout}, this version reads {LAYOUT}"
                db.execute(f"select {_COLUMNS} from entries limit 1").fetchone()
                check = "pragma integrity_check" if thorough else "pragma quick_check(1)"
                first = _text(db.execute(check).fetchone()[0])
                return None if first == "ok" else f"it is damaged ({first})"
        except (sqlite3.Error, UnicodeError) as e:
            if _is_damage(e):
                return f"it is damaged ({e})"
            raise OSError(str(e)) from e

    def _give_up(self, error: OSError) -> None:
        if self.writable:
            self._log.warning(
                "cache folder %s cannot be written (%s): nothing is stored", self.folder, error
            )
        self.writable = False


class _Damaged(sqlite3.DatabaseError):
    """A structure that SQLite's own check finds broken."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def _is_damage(e: Exception) -> bool:
    if isinstance(e, UnicodeError):  # a column's name in a damaged schema
        return True
    return getattr(e, "sqlite_errorcode", -1) & 0xFF in _DAMAGE


def _row(db: sqlite3.Connection, digest: str) -> Row | None:
    query = f"select {_COLUMNS} from entries where digest = ?"
    found: Row | None = db.execute(query, (digest,)).fetchone()
    return found


def _insert(db: sqlite3.Connection, row: Row) -> None:
    db.execute(f"insert or replace into entries ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _delete(db: sqlite3.Connection, digest: str | None) -> int:
    if digest is None:
        return db.execute("delete from entries").rowcount
    return db.execute("delete from entries where digest = ?", (digest,)).rowcount


def _checksum(fields: Row) -> str:
    return sha256(b"\x00".join(_bytes(f) for f in fields))


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else repr(value).encode()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _json_text(value: Any) -> str:
    _refuse_enums(value)
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as e:
        raise UserError(f"cache payload is not JSON: {e}") from e


def _refuse_enums(value: Any) -> None:
    """An enum's number may mean something else in the next release; its name may not."""
    if isinstance(value, enum.Enum) and not isinstance(value, str):
        raise UserError(f"cache payload holds {value!r}: store its name")
    if isinstance(value, Mapping):
        for k, v in value.items():
            _refuse_enums(k)
            _refuse_enums(v)
    elif isinstance(value, list | tuple):
        for v in value:
            _refuse_enums(v)


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _move_aside(path: Path) -> Path:
    """Rename a file (and what SQLite keeps beside it) to the first free `*.corrupt` name."""
    n = 0
    while (target := path.with_name(f"{path.name}{f'.{n}' if n else ''}.corrupt")).exists():
        n += 1
    for tail in ("-wal", "-shm"):
        side = path.with_name(path.name + tail)
        if side.exists():
            os.replace(side, target.with_name(target.name + tail))
    os.replace(path, target)
    return target
