"""Requests in, replies out: what each message of the protocol asks of the core.

No sockets here: a ``Caller`` is whoever asks, and is answered now or later.

Source: design, section 5.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from snapd import __version__, bounds
from snapd import wire as w
from snapd.access import Rights
from snapd.arena import HostArena
from snapd.compiling import is_compiled, mypyc_attr
from snapd.config import Config
from snapd.core import events as e
from snapd.core.machine import view_session
from snapd.core.overview import Overview
from snapd.cudaarena import CudaArena
from snapd.errors import Reason
from snapd.executor import Executor
from snapd.layout import Layout
from snapd.permissions import refusal
from snapd.requestevents import event_of as event_of
from snapd.units import NS_PER_MS

# What a client may call itself; the rest is cut off.
LABEL_CHARS_MAX: Final = 64

OPEN_STATES: Final = frozenset(e.State) - e.FINAL_STATES

AnyArena: TypeAlias = HostArena | CudaArena


class KVEventStream(Protocol):
    """What publishes KV events."""

    def on_grant(self, request: w.SnapshotPrepareReceiveReqInput, granted: e.Granted) -> None:
        """Keep what D said of an attempt for events."""
        ...

    def statistics(self) -> w.KVEventStatistics:
        """Return how it fares."""
        ...


class Caller(Protocol):
    """Whoever sends requests over one connection."""

    conn_id: int
    # What it calls itself, else its process.
    label: str
    rights: Rights
    # On this host, so that it can map memory.
    is_local: bool

    def send(self, message: w.AnyReply) -> None:
        """Answer; does nothing once the caller is gone."""
        ...

    def writer_id(self) -> int:
        """Return the id under which the caller's process is watched, or 0."""
        ...

    def watch(self, session_id: str) -> bool:
        """Push transitions to the caller from now on; False: there are too many watchers."""
        ...

    def hand_over(self, message: w.MapBufferRep, fd: int) -> bool:
        """Answer with a file descriptor; False: replies are still under way on this connection."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Service:
    """Answers requests.

    Args:
        config: for the bounds that clients are told.
        epoch: this life of the daemon.
        executor: runs the core.
        arenas: by rank, with the base pointer of each in the transport's address space.
        transport_address: what a writer must know to reach them.
        log_statistics: how the log fares.
        counts: connections and watchers, now.
        mooncake_statistics: how Mooncake fares, if it is the transport.

    Attributes:
        refused: error replies so far, by reason.
        kv_events: what publishes them; None: nobody.
        usages: say how much of their bounds is in use, by setting.
        origin: where each setting came from; what is missing is a default.
    """

    def __init__(
        self,
        config: Config,
        epoch: str,
        executor: Executor,
        arenas: dict[int, tuple[AnyArena, int]],
        transport_address: str,
        log_statistics: Callable[[], w.LogStatistics],
        counts: Callable[[], tuple[int, int]],
        mooncake_statistics: Callable[[], w.MooncakeStatistics] | None = None,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._executor = executor
        self._arenas = arenas
        self._transport_address = transport_address
        self._log_statistics = log_statistics
        self._counts = counts
        self._mooncake_statistics = mooncake_statistics
        self.refused: Counter[Reason] = Counter()
        self.kv_events: KVEventStream | None = None
        self.usages: list[Callable[[], Mapping[str, int]]] = [self._usage]
        self.origin: Mapping[str, str] = {}
        self._limits = {name: bounds.value_of(config, name) for name in bounds.SETTINGS}
        self._started_ns = executor.now_ns()
        self._is_compiled = is_compiled()
        self._handlers: dict[type[w.Request], Callable[..., None]] = {
            w.HelloReq: self._hello,
            w.PingReq: self._ping,
            w.SnapshotPrepareReceiveReqInput: self._prepare,
            w.MapBufferReq: self._map_buffer,
            w.GetReq: self._get,
            w.ListReq: self._list,
            w.StatsReq: self._stats,
            w.WatchReq: self._watch,
        }

    def take(self, caller: Caller, request: w.AnyRequest) -> None:
        """Answer *request*, now or, for a vote that waits for others, later."""
        if isinstance(request, w.HandleRequest) and request.epoch not in ("", self._epoch):
            detail = f"the handle is of epoch {request.epoch[:32]}; this is {self._epoch}"
            caller.send(self._error(request.id, Reason.STALE_HANDLE, detail))
            return
        if not caller.rights.is_full:
            refused = refusal(caller.rights, request, self._executor.machine.books)
            if refused is not None:
                caller.send(self._error(request.id, *refused))
                return
        handler = self._handlers.get(type(request))
        if handler is not None:
            handler(caller, request)
        else:
            self._ask_core(caller, request)

    # --- hello, ping, layouts ------------------------------------------------------------------

    def _hello(self, caller: Caller, request: w.HelloReq) -> None:
        if request.protocol != w.PROTOCOL_VERSION:
            detail = f"the daemon speaks protocol {w.PROTOCOL_VERSION}, the client {request.protocol}"
            caller.send(self._error(request.id, Reason.INVALID_REQUEST, detail))
            return
        if request.client:
            label = request.client[:LABEL_CHARS_MAX]
            # Whoever is bound by rules cannot pass for another.
            caller.label = label if caller.rights.is_full else f"{caller.rights.owner}: {label}"
        config = self._config
        caller.send(
            w.HelloRep(
                id=request.id,
                protocol=w.PROTOCOL_VERSION,
                epoch=self._epoch,
                version=__version__,
                arenas=tuple(
                    w.ArenaOffer(
                        rank=rank, device=arena.device, size_bytes=arena.size_bytes, base_ptr=base_ptr
                    )
                    for rank, (arena, base_ptr) in self._arenas.items()
                ),
                transport=config.transport,
                transport_address=self._transport_address,
                alignment_bytes=config.alignment_bytes,
                frame_bytes_max=config.frame_bytes_max,
                requests_in_flight_max=config.requests_in_flight_max,
                page_keys_max=config.page_keys_max,
                lease_ms=config.lease_ms,
                mooncake=self._mooncake_address(),
                kv_events=(
                    w.KVEventsWanted(token_ids_max=config.kv_events_token_ids_max)
                    if config.kv_events_address
                    else None
                ),
            )
        )

    def _mooncake_address(self) -> w.MooncakeAddress | None:
        if self._config.transport != "mooncake":
            return None
        return w.MooncakeAddress(
            segment_name=self._transport_address,
            protocol=self._config.mooncake.protocol,
            metadata_server=self._config.mooncake.metadata_server,
        )

    def _ping(self, caller: Caller, request: w.PingReq) -> None:
        caller.send(w.PingRep(id=request.id, epoch=self._epoch))

    # --- D -------------------------------------------------------------------------------------

    def _prepare(self, caller: Caller, request: w.SnapshotPrepareReceiveReqInput) -> None:
        executor = self._executor
        event = e.PrepareAsked(
            at_ns=executor.now_ns(),
            cause_id=executor.new_cause_id(),
            slab_handle=executor.new_handle(),
            session_id=request.session_id,
            layout_fingerprint=request.layout_fingerprint,
            num_tokens=request.num_tokens,
            token_start=request.token_start,
            token_digest=request.token_digest,
            page_keys=request.page_keys,
            ranks=request.ranks,
            use_resident_hint=request.use_resident_hint,
            conn_id=caller.conn_id,
            writer_id=caller.writer_id() if request.is_only_writer else 0,
            peer=caller.label,
            owner=caller.rights.owner,
        )

        def on_result(result: e.Result) -> None:
            if self.kv_events is not None and isinstance(result, e.Granted):
                self.kv_events.on_grant(request, result)
            if isinstance(result, e.Refused) and result.reason is Reason.LAYOUT_MISMATCH:
                result = _without_others_layouts(result, caller.rights)
            caller.send(self._prepared(request.id, result))

        executor.take(event, on_result)

    def _prepared(self, request_id: int, result: e.Result) -> w.AnyReply:
        if isinstance(result, e.Granted):
            expires_ms = (result.deadline_ns - self._executor.now_ns()) // NS_PER_MS
            return w.SnapshotPrepareReceiveReqOutput(
                id=request_id,
                ok=True,
                slab_handle=result.slab_handle,
                num_tokens=result.num_tokens,
                token_start=result.token_start,
                resident_hint_tokens=result.resident_hint_tokens,
                ranks=tuple([self._rank_grant(result.layout, shard) for shard in result.shards]),
                expires_ms=max(0, expires_ms),
            )
        if isinstance(result, e.Refused):
            return w.SnapshotPrepareReceiveReqOutput(
                id=request_id,
                ok=False,
                reason=result.reason,
                detail=result.detail,
                retry_after_ms=result.retry_after_ms,
            )
        return _unexpected(request_id, result)

    def _rank_grant(self, layout: Layout, shard: e.ShardGrant) -> w.RankGrant:
        num_layers = len(layout.k_stride_bytes)
        return w.RankGrant(
            rank=shard.rank,
            snapshot_buf_base_ptr=self._arenas[shard.rank][1],
            k_layer_offsets=shard.plane_offsets_bytes[:num_layers],
            v_layer_offsets=shard.plane_offsets_bytes[num_layers:],
            stride_k_bytes=layout.k_stride_bytes,
            stride_v_bytes=layout.v_stride_bytes,
            extents=shard.extents,
        )

    # --- anybody -------------------------------------------------------------------------------

    def _map_buffer(self, caller: Caller, request: w.MapBufferReq) -> None:
        known = self._arenas.get(request.rank)
        if known is None:
            detail = f"there is no arena {request.rank}; there are {sorted(self._arenas)}"
            caller.send(self._error(request.id, Reason.WRONG_RANK, detail))
            return
        if not caller.is_local:
            detail = "an arena is mapped by processes of the daemon's host, over its unix socket"
            caller.send(self._error(request.id, Reason.INVALID_REQUEST, detail))
            return
        arena = known[0]
        if isinstance(arena, CudaArena):
            caller.send(self._cuda_memory(request, arena))
            return
        try:
            fd = arena.open_fd(writable=request.writable)
        except OSError as error:
            detail = f"no file descriptor for arena {request.rank}: {error.strerror}"
            caller.send(self._error(request.id, Reason.LIMIT_REACHED, detail))
            return
        try:
            reply = w.MapBufferRep(
                id=request.id, rank=request.rank, size_bytes=arena.size_bytes, epoch=self._epoch
            )
            if not caller.hand_over(reply, fd):
                detail = "ask for a buffer on a connection of its own"
                caller.send(self._error(request.id, Reason.WRONG_STATE, detail))
        finally:
            os.close(fd)

    def _cuda_memory(self, request: w.MapBufferReq, arena: CudaArena) -> w.MapBufferRep:
        return w.MapBufferRep(
            id=request.id,
            rank=request.rank,
            size_bytes=arena.size_bytes,
            epoch=self._epoch,
            cuda=w.CudaMemory(ipc_handle=arena.ipc_handle(), gpu_uuid=arena.gpu_uuid, device=arena.device),
        )

    def _get(self, caller: Caller, request: w.GetReq) -> None:
        view = self._executor.machine.view(request.slab_handle)
        if view is None:
            detail = f"no attempt {request.slab_handle} in this epoch"
            caller.send(self._error(request.id, Reason.STALE_HANDLE, detail))
        else:
            caller.send(w.GetRep(id=request.id, session=view, now_ns=self._executor.now_ns()))

    def _list(self, caller: Caller, request: w.ListReq) -> None:
        if not 1 <= request.limit <= w.LIST_MAX or request.offset < 0:
            detail = f"limit must be 1 to {w.LIST_MAX} and offset not negative"
            caller.send(self._error(request.id, Reason.INVALID_REQUEST, detail))
            return
        states = frozenset(request.states) or OPEN_STATES
        page, total = self._executor.machine.page(states, request.session_id, request.offset, request.limit)
        caller.send(
            w.ListRep(
                id=request.id,
                sessions=tuple(view_session(session) for session in page),
                total=total,
                now_ns=self._executor.now_ns(),
            )
        )

    def _stats(self, caller: Caller, request: w.StatsReq) -> None:
        def on_overview(overview: Overview | None) -> None:
            statistics = self.statistics(request.id, overview)
            if request.bounds:
                statistics = msgspec.structs.replace(statistics, bounds=tuple(self._bounds()))
            caller.send(statistics)

        if request.overview is None:
            on_overview(None)
            return

        self._executor.overviews.ask(request.overview, on_overview)

    def statistics(self, request_id: int = 0, overview: Overview | None = None) -> w.StatsRep:
        """Return how everything fares now, as the reply to a request."""
        connections, watchers = self._counts()
        now_ns = self._executor.now_ns()
        return w.StatsRep(
            id=request_id,
            version=__version__,
            epoch=self._epoch,
            pid=os.getpid(),
            uptime_ms=(now_ns - self._started_ns) // NS_PER_MS,
            now_ns=now_ns,
            transport=self._config.transport,
            connections=connections,
            watchers=watchers,
            requests_waiting=self._executor.num_waiting,
            timers=self._executor.num_timers,
            core=self._executor.machine.statistics(),
            log=self._log_statistics(),
            limits=self._limits,
            mooncake=self._mooncake_statistics() if self._mooncake_statistics else None,
            kv_events=self.kv_events.statistics() if self.kv_events else None,
            overview=overview,
            is_compiled=self._is_compiled,
        )

    def _bounds(self) -> Iterator[w.BoundView]:
        """Yield every bound, with how much of it is in use."""
        used: dict[str, int] = {}
        for usage in self.usages:
            used.update(usage())
        return bounds.views(self._config, self.origin, used)

    def _usage(self) -> dict[str, int]:
        books, log = self._executor.machine.books, self._log_statistics()
        return {
            "sessions_max": len(books.open) + len(books.buffer.quarantine),
            "ended_history_max": len(books.ended),
            "session_history_max": books.directory.num_hints,
            "layouts_max": len(books.directory.layouts),
            "page_keys_total_max": books.page_keys_held,
            "log_queue_bytes_max": log.queued_bytes,
            "log_queue_lines_max": log.queued_lines,
        }

    def _watch(self, caller: Caller, request: w.WatchReq) -> None:
        if caller.watch(request.session_id):
            caller.send(w.AckRep(id=request.id))
        else:
            detail = f"{self._config.watchers_max} connections watch already (watchers_max)"
            caller.send(self._error(request.id, Reason.LIMIT_REACHED, detail))

    def _error(self, request_id: int, reason: Reason, detail: str, retry_after_ms: int = 0) -> w.ErrorRep:
        self.refused[reason] += 1
        return w.ErrorRep(id=request_id, reason=reason, detail=detail, retry_after_ms=retry_after_ms)

    # --- results into replies ------------------------------------------------------------------

    def _ask_core(self, caller: Caller, request: w.AnyRequest) -> None:
        """Ask what the request stands for, and turn the result into its reply."""
        executor = self._executor
        request_id = request.id

        def on_result(result: e.Result) -> None:
            caller.send(self._reply(request_id, result))

        executor.take(
            event_of(request, caller.conn_id, executor.now_ns(), executor.new_cause_id()), on_result
        )

    def _reply(self, request_id: int, result: e.Result) -> w.AnyReply:
        match result:
            case e.Accepted():
                return w.AckRep(id=request_id, state=result.state, pending=result.pending)
            case e.Refused():
                return self._error(request_id, result.reason, result.detail, result.retry_after_ms)
            case e.Leased():
                return self._lease(request_id, result)
            case e.Decided():
                return w.VoteRep(
                    id=request_id, commit=result.commit, reason=result.reason, state=result.state
                )
            case e.Found():
                return w.LookupRep(
                    id=request_id,
                    slab_handle=result.slab_handle,
                    session_id=result.session_id,
                    num_tokens=result.num_tokens,
                    token_start=result.token_start,
                    matched_tokens=result.matched_tokens,
                    resident_hint_tokens=result.resident_hint_tokens,
                    ranks=result.ranks,
                )
            case e.Declared():
                return w.DeclareLayoutRep(id=request_id, layout_fingerprint=result.layout_fingerprint)
        return _unexpected(request_id, result)

    def _lease(self, request_id: int, result: e.Leased) -> w.BeginIngestRep:
        lease_ms = (result.deadline_ns - self._executor.now_ns()) // NS_PER_MS
        # As they are kept: they need not become numbers again to be sent.
        checksums: Any = msgspec.Raw(result.packed_checksums)
        return w.BeginIngestRep(
            id=request_id,
            session_id=result.session_id,
            lease_id=result.lease_id,
            lease_ms=max(0, lease_ms),
            num_tokens=result.num_tokens,
            token_start=result.token_start,
            token_digest=result.token_digest,
            checksums=checksums,
            grant=self._rank_grant(result.layout, result.shard),
        )


def _without_others_layouts(refused: e.Refused, rights: Rights) -> e.Refused:
    """Return *refused*; for whoever sees some tenants only, without the names of what others declared."""
    if rights.tenants is None:
        return refused
    detail = "no P of this tenant has declared this layout for these ranks"
    return msgspec.structs.replace(refused, detail=detail)


def _unexpected(request_id: int, result: e.Result) -> w.ErrorRep:
    detail = f"unexpected {type(result).__name__}"
    return w.ErrorRep(id=request_id, reason=Reason.INTERNAL_ERROR, detail=detail)
