"""Who is where: sessions by name, READY snapshots by page key, declared layouts, resident hints.

Every table is bounded: attempts by ``sessions_max``, layouts and hints by their own settings,
the least recently used going first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from snapd.core.attempt import Session
from snapd.core.planes import Planes
from snapd.errors import InvariantBroken
from snapd.layout import Layout

Key: TypeAlias = tuple[str, str]


class DeclaredLayout:
    """A layout, what its planes take, and the ranks whose kv_pool has it."""

    __slots__ = ("layout", "planes", "ranks")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.planes = Planes(layout)
        self.ranks: set[int] = set()

    def __repr__(self) -> str:
        return f"DeclaredLayout({self.layout!r}, {self.ranks!r})"


class Directory:
    """Finds attempts, layouts and hints by name."""

    def __init__(self, layouts_max: int, hints_max: int) -> None:
        self._layouts_max = layouts_max
        self._hints_max = hints_max
        self.layouts: OrderedDict[str, DeclaredLayout] = OrderedDict()
        self._hints: OrderedDict[Key, int] = OrderedDict()
        self._writing: dict[Key, int] = {}
        self._ready: dict[Key, int] = {}
        self._by_page: dict[Key, dict[int, None]] = {}

    # --- layouts

    def declare(self, layout_fingerprint: str, layout: Layout, rank: int) -> None:
        """Remember that *rank* has this layout."""
        declared = self.layouts.get(layout_fingerprint)
        if declared is None:
            declared = self.layouts[layout_fingerprint] = DeclaredLayout(layout)
        declared.ranks.add(rank)
        self.layouts.move_to_end(layout_fingerprint)
        while len(self.layouts) > self._layouts_max:
            self._forget_a_layout()

    def _forget_a_layout(self) -> None:
        """Forget the least recently used one of the tenant that has most, so that none drives others' out."""
        held = Counter(declared.layout.namespace.tenant for declared in self.layouts.values())
        most = max(held.values())
        for name, declared in self.layouts.items():
            if held[declared.layout.namespace.tenant] == most:
                del self.layouts[name]
                return

    def layout(self, layout_fingerprint: str) -> DeclaredLayout | None:
        """Return a declared layout, which counts as use, or None."""
        declared = self.layouts.get(layout_fingerprint)
        if declared is not None:
            self.layouts.move_to_end(layout_fingerprint)
        return declared

    # --- what P is believed to hold

    def hint_tokens(self, key: Key) -> int:
        """Return up to which token P is believed to hold the session; 0: nothing is known."""
        return self._hints.get(key, 0)

    def set_hint(self, key: Key, end_tokens: int) -> None:
        """Remember what the session's last INGESTED attempt covered; 0 forgets it."""
        self._hints.pop(key, None)
        if end_tokens:
            self._hints[key] = end_tokens
            while len(self._hints) > self._hints_max:
                self._hints.popitem(last=False)

    @property
    def num_hints(self) -> int:
        """Number of sessions with a hint."""
        return len(self._hints)

    # --- attempts

    @property
    def num_writing(self) -> int:
        """Number of RESERVED and TRANSFERRING attempts."""
        return len(self._writing)

    def writing(self, key: Key) -> int | None:
        """Return the session's RESERVED or TRANSFERRING attempt."""
        return self._writing.get(key)

    def ready(self, key: Key) -> int | None:
        """Return the session's READY attempt; the newest when an older one waits for its readers."""
        return self._ready.get(key)

    def add_writing(self, session: Session) -> None:
        """Enter a new attempt."""
        self._writing[session.key] = session.handle

    def make_ready(self, session: Session) -> None:
        """The attempt is READY: it can be found by name and by prefix."""
        if self._writing.get(session.key) == session.handle:
            del self._writing[session.key]
        self._ready[session.key] = session.handle
        for page_key in session.page_keys:
            self._by_page.setdefault((session.key[0], page_key), {})[session.handle] = None

    def remove(self, session: Session) -> None:
        """The attempt has ended."""
        key, handle = session.key, session.handle
        if self._writing.get(key) == handle:
            del self._writing[key]
        if self._ready.get(key) == handle:
            del self._ready[key]
        for page_key in session.page_keys:
            holders = self._by_page.get((session.key[0], page_key))
            if holders is not None and holders.pop(session.handle, 0) is None and not holders:
                del self._by_page[(session.key[0], page_key)]

    def longest_prefix(
        self, layout_fingerprint: str, page_keys: tuple[str, ...]
    ) -> Iterable[tuple[int, int]]:
        """Yield ``(handle, matched pages)`` of READY snapshots, the longest match first."""
        seen: set[int] = set()
        for index in range(len(page_keys) - 1, -1, -1):
            for handle in reversed(self._by_page.get((layout_fingerprint, page_keys[index]), {})):
                if handle not in seen:
                    seen.add(handle)
                    yield handle, index + 1

    @property
    def num_page_keys(self) -> int:
        """Number of distinct page keys that can be found."""
        return len(self._by_page)

    def validate(self, writing: dict[int, Session], ready: dict[int, Session]) -> None:
        """Check the tables against the open attempts, given by handle.

        Raises:
            InvariantBroken: they do not agree.
        """
        if sorted(self._writing.values()) != sorted(writing):
            raise InvariantBroken("the table of RESERVED and TRANSFERRING attempts is wrong")
        newest = {h for h, s in ready.items() if s.newer_handle == 0}
        if not newest <= set(self._ready.values()) <= set(ready):
            raise InvariantBroken("the table of READY attempts is wrong")
        holders = {(key[1], handle) for key, by in self._by_page.items() for handle in by}
        wanted = {(page_key, h) for h, s in ready.items() for page_key in s.page_keys}
        if holders != wanted:
            raise InvariantBroken("the table of page keys is wrong")
        if any(not by for by in self._by_page.values()):
            raise InvariantBroken("an empty entry is left in the table of page keys")
        if len(self.layouts) > self._layouts_max or len(self._hints) > self._hints_max:
            raise InvariantBroken("a table is larger than its bound")
