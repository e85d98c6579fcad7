"""D and P of a live replay: kv_pools in this process's memory, a Pusher, and an Ingester a rank.

D's pool has a lane for each turn that may be under way: as many slots as the longest session has tokens. P's
slots and tree are the demo's. KV is a function of seed, session, rank, token, plane and place in the row, so
that P's can be compared with it when D's is gone.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

import torch

from snapd.arena import available_memory_bytes
from snapd.client import Client
from snapd.demo.cache import PagedCache
from snapd.demo.plan import PAGE_SIZE_TOKENS, NotEnoughMemory
from snapd.errors import ConfigError
from snapd.kv.ingest import Ingester
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher
from snapd.layout import Namespace
from snapd.replay.liveplan import CLIENT_NAME, LiveOptions, Plan, Session
from snapd.units import align_down, align_up, format_bytes

NAMESPACE: Final = Namespace(model="snapd-replay")
WORD_BYTES: Final = 8
_ELEMENT_BYTES: Final = 2
# What is made or compared in one step.
_CHUNK_BYTES: Final = 1 << 20
# Sessions that may go for another.
_ALL: Final = 1 << 31
_MIX_1, _MIX_2, _GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return *words*, int64, each well mixed: the last steps of splitmix64, with arithmetic shifts."""
    words = (words ^ words >> 30) * _MIX_1
    words = (words ^ words >> 27) * _MIX_2
    return words ^ words >> 31


class KvContent:
    """KV that is computed: a word is the product of one number for its token and one for its place.

    Both are mixed, the second is odd, so that no token, plane or place can stand in for another.

    Args:
        seed: of the replay.
        num_planes: of the layout.
        row_words: of a row in a plane.
    """

    def __init__(self, seed: int, num_planes: int, row_words: int) -> None:
        self._seed = seed
        places = torch.arange(1, num_planes * row_words + 1) * _GOLDEN
        self._places = (_mixed(places) | 1).view(num_planes, 1, row_words)

    def words(
        self, session: int, rank: int, tokens: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the KV of tokens, int64, shape [num_planes, len(tokens), row_words]; always the same.

        Args:
            session: its number.
            rank: whose shard.
            tokens: positions in the session, int64, shape [n].
            out: where to put it; else somewhere new.
        """
        first = hash((self._seed, session, rank)) & (1 << 62) - 1
        by_token = _mixed((tokens + 1) * _GOLDEN ^ first)
        return torch.mul(by_token[None, :, None], self._places, out=out)


def row_words(options: LiveOptions) -> int:
    """Return the words of a row in a plane."""
    return options.kv_heads * options.head_dim * _ELEMENT_BYTES // WORD_BYTES


class _Memory:
    """A kv_pool's memory, int64, shape [num_planes, num_slots, row_words]."""

    def __init__(self, options: LiveOptions, num_slots: int) -> None:
        self.words = torch.zeros((2 * options.layers, num_slots, row_words(options)), dtype=torch.int64)
        rows = [
            plane.view(torch.bfloat16).view(-1, options.kv_heads, options.head_dim) for plane in self.words
        ]
        self.pool = KVPool.mha(rows[: options.layers], rows[options.layers :], PAGE_SIZE_TOKENS)


class Worker:
    """D and P of all ranks that the daemon has.

    Args:
        client: D's; each rank of P gets one of its own.
        options: of the replay.
        plan: what is played.

    Attributes:
        pusher: D's.
        ingesters: P's, by rank.
        token_bytes: of a token on one rank.

    Raises:
        ConfigError: an arena, or P's pool, has no room for the longest session.
        NotEnoughMemory: there is not enough memory for the pools.
    """

    def __init__(self, client: Client, options: LiveOptions, plan: Plan) -> None:
        self._options = options
        self.token_bytes = 2 * options.layers * options.kv_heads * options.head_dim * _ELEMENT_BYTES
        self._lane_slots = align_up(plan.longest_tokens, PAGE_SIZE_TOKENS)
        arenas = client.hello.arenas
        p_slots = align_down(options.pool_bytes // self.token_bytes, PAGE_SIZE_TOKENS)
        # No more than all sessions together can fill.
        all_tokens = sum(align_up(s.steps[-1].end_tokens, PAGE_SIZE_TOKENS) for s in plan.sessions)
        p_slots = min(p_slots, all_tokens + self._lane_slots)
        self._check_sizes(min(arena.size_bytes for arena in arenas), p_slots, len(arenas))
        d_slots = options.turns_at_once * self._lane_slots
        ranks = [arena.rank for arena in arenas]
        self._d = {rank: _Memory(options, d_slots) for rank in ranks}
        self._p = {rank: _Memory(options, p_slots) for rank in ranks}
        self._caches = {rank: PagedCache(p_slots, p_slots) for rank in ranks}
        self._content = KvContent(options.seed, 2 * options.layers, row_words(options))
        self._chunk_tokens = max(1, _CHUNK_BYTES // self.token_bytes)
        with contextlib.ExitStack() as stack:
            self.pusher = Pusher(client, {rank: memory.pool for rank, memory in self._d.items()}, NAMESPACE)
            stack.callback(self.pusher.close)
            self.ingesters: list[Ingester] = []
            for rank in ranks:
                own = stack.enter_context(
                    Client(options.socket_path, timeout_s=options.timeout_s, name=f"{CLIENT_NAME} P {rank}")
                )
                ingester = Ingester(
                    own,
                    rank,
                    self._p[rank].pool,
                    self._caches[rank],
                    NAMESPACE,
                    keep_on_alloc_failure=False,
                    keep_on_missing_prefix=False,
                )
                stack.callback(ingester.close)
                self.ingesters.append(ingester)
            self._stack = stack.pop_all()

    def _check_sizes(self, arena_bytes: int, p_slots: int, num_ranks: int) -> None:
        longest_bytes = self._lane_slots * self.token_bytes
        shorter = "use a smaller --max-tokens"
        if longest_bytes > arena_bytes:
            raise ConfigError(
                f"the longest session has {format_bytes(longest_bytes)} a rank, and the smallest arena has "
                f"{format_bytes(arena_bytes)}: {shorter}"
            )
        if self._lane_slots > p_slots:
            raise ConfigError(
                f"the longest session has {self._lane_slots} tokens, and P's kv_pool of "
                f"{format_bytes(self._options.pool_bytes)} has slots for {p_slots}: {shorter}"
            )
        slots = self._options.turns_at_once * self._lane_slots + p_slots
        wanted_bytes = slots * self.token_bytes * num_ranks
        available_bytes = available_memory_bytes()
        if available_bytes is not None and wanted_bytes > available_bytes:
            raise NotEnoughMemory(
                f"the kv_pools of a live replay take {format_bytes(wanted_bytes)}, and "
                f"{format_bytes(available_bytes)} can be had: {shorter}"
            )

    def close(self) -> None:
        """Unmap the arenas and close P's connections; what is open at the daemon stays so."""
        self._stack.close()

    # --- D

    def lane_slots(self, lane: int, num_tokens: int) -> torch.Tensor:
        """Return slots of D's pools that are one turn's own, int64, shape [num_tokens]."""
        return torch.arange(num_tokens) + lane * self._lane_slots

    def make(self, session: int, lane: int, first_token: int, num_tokens: int) -> Iterator[None]:
        """Put the KV of tokens from *first_token* on into D's pools, some at each step."""
        for start in range(0, num_tokens, self._chunk_tokens):
            tokens = torch.arange(start, min(start + self._chunk_tokens, num_tokens))
            slot = lane * self._lane_slots + start
            for rank, memory in self._d.items():
                rows = memory.words[:, slot : slot + len(tokens)]
                self._content.words(session, rank, tokens + first_token, rows)
            yield

    # --- P

    @contextlib.contextmanager
    def room_for(self, session: Session) -> Iterator[None]:
        """Keep what P's trees have of a session, and have P evict idle ones if it has no slots for the rest.

        The block should end after the last look at P's slots: another turn's ingest wants slots as well.
        """
        token_ids = session.token_ids(session.end_tokens)
        with contextlib.ExitStack() as pins:
            for cache in self._caches.values():
                missing_tokens = len(token_ids) - cache.lock_prefix(session.session_id, token_ids)
                pins.callback(cache.unlock_prefix, session.session_id)
                # A partial last page comes again, in a page of its own.
                wanted_tokens = missing_tokens + PAGE_SIZE_TOKENS
                cache.end_prefill(cache.take_for_prefill(wanted_tokens, idle_victims=_ALL))
            yield

    def resident_tokens(self, session_id: str) -> int:
        """Return how many of a session's tokens are in the tree of every rank."""
        return min(_resident_tokens(cache, session_id) for cache in self._caches.values())

    def compare(self, session: Session, first_token: int, end_tokens: int) -> Iterator[bool]:
        """Compare what lies in P's slots with what D had; yield for some tokens at a time if it is the same.

        By plain indexing: nothing of what brought the bytes here is used.
        """
        for rank, cache in self._caches.items():
            slots = cache.slots_of(session.session_id)[first_token:end_tokens]
            words = self._p[rank].words
            for start in range(0, len(slots), self._chunk_tokens):
                chunk = slots[start : start + self._chunk_tokens]
                tokens = torch.arange(len(chunk)) + first_token + start
                yield words[:, chunk].equal(self._content.words(session.index, rank, tokens))


def _resident_tokens(cache: PagedCache, session_id: str) -> int:
    try:
        return len(cache.slots_of(session_id))
    except KeyError:
        return 0
