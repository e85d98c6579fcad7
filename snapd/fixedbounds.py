"""The bounds that are constants: part of the protocol, or of how a module works, and no settings.

The values stand here once more beside their modules: a test holds the two against each other, knows by its
name which constant is a bound, and finds those that are missing here. The tables of docs/bounds.md and what
``snapd status --limits`` shows come from here.

Source: design, sections 5 and 12.
"""

from typing import Final, NamedTuple

from snapd.units import KIB, MIB


class Bound(NamedTuple):
    """A constant that bounds something.

    Attributes:
        name: module and constant.
        value: in *unit*.
        unit: of the value; empty: a number.
        what: is bounded.
        at_bound: what comes at it.
    """

    name: str
    value: int
    unit: str
    what: str
    at_bound: str


# fmt: off
# Fixed in the daemon.
DAEMON: Final = (
    Bound("snapd.ratelimit.BURST_S", 10, "s",
          "burst of an address that connects over TCP", "further connections are closed"),
    Bound("snapd.server._TURN_REQUESTS_MAX", 64, "",
          "requests of one connection that are answered in a turn", "the others get their turn"),
    Bound("snapd.server._GATHERED_BYTES", 16 * KIB, "bytes",
          "replies of one turn that are written together", "they are written"),
    Bound("snapd.wire.LIST_MAX", 1_000, "",
          "attempts in one reply to a list", "the client asks for the next page"),
    Bound("snapd.service.LABEL_CHARS_MAX", 64, "characters",
          "what a client calls itself", "the rest is cut off"),
    Bound("snapd.layout.NAME_CHARS_MAX", 256, "characters",
          "a name in a layout or in an access rule", "it is refused"),
    Bound("snapd.access.CERTIFICATE_NAME_CHARS_MAX", 255, "characters",
          "a name in a certificate", "the name does not count"),
    Bound("snapd.tcplistener._NAMES_MAX", 64, "",
          "names in a certificate", "the others do not count"),
    Bound("snapd.layout.LAYERS_MAX", 1_024, "",
          "layers of a layout", "the layout is refused"),
    Bound("snapd.layout.STRIDE_BYTES_MAX", 16 * MIB, "bytes",
          "a plane's bytes a token", "the layout is refused"),
    Bound("snapd.layout.PAGE_SIZE_TOKENS_MAX", 65_536, "",
          "tokens in a page", "the layout is refused"),
    Bound("snapd.core.session.DIGEST_CHARS_MAX", 64, "characters",
          "a token digest or a page key", "`invalid-request`"),
    Bound("snapd.core.course.ANSWERS_MAX_PER_RANK", 32, "",
          "answers kept for repeats, an attempt and rank", "the oldest vote's goes"),
    Bound("snapd.core.lives.VOTES_WAITING_MAX", 64, "",
          "repeats of one vote that wait for the other ranks", "the oldest is answered `limit-reached`"),
    Bound("snapd.core.survey.PEERS_COUNTED_MAX", 256, "",
          "D workers that an overview counts one by one", "the others are added up"),
    Bound("snapd.core.overview.PEERS_MAX", 64, "",
          "D workers in an overview", "the others are added up"),
    Bound("snapd.core.overview.ATTEMPTS_MAX", 100, "",
          "attempts in an overview", "the first in the order asked for"),
    Bound("snapd.core.overview.CELLS_MAX", 256, "",
          "cells of one arena's map", "each stands for more bytes"),
    Bound("snapd.core.overview.CELLS_TOTAL_MAX", 4_096, "",
          "cells of all maps together", "each stands for more bytes"),
    Bound("snapd.overviews.TURN_MAX", 512, "",
          "attempts an overview looks at in a turn", "the others get their turn"),
    Bound("snapd.notifications.TURN_MAX", 64, "",
          "notifications that are handled in a turn", "the others get their turn"),
    Bound("snapd.logwriter.BATCH_BYTES_MAX", 256 * KIB, "bytes",
          "one write to the log", "the next write follows"),
    Bound("snapd.logfile._OPEN_TRIES_MAX", 10, "",
          "tries to open the log while somebody moves it", "the write fails, and is tried again"),
    Bound("snapd.logrecovery.LINE_BYTES_MAX", 1 * MIB, "bytes",
          "a line that is read from an old log at the start", "it is skipped"),
    Bound("snapd.eventlog._WHY_CHARS_MAX", 256, "characters",
          "the reason in a report of dropped lines", "the rest is cut off"),
    Bound("snapd.eventlog._HELD_MAX", 1_024, "",
          "records of a turn that wait for its replies", "their lines are made"),
    Bound("snapd.executor._GROWTH_MAX", 2, "times",
          "growth of what the garbage collector leaves alone", "everything is looked at"),
    Bound("snapd.metrics.endpoint.HEAD_BYTES_MAX", 8 * KIB, "bytes",
          "the head of a request for metrics", "it is cut off"),
    Bound("snapd.metrics.serving._BACKLOG", 16, "",
          "connections for metrics that wait to be accepted", "the kernel lets them wait"),
    Bound("snapd.metrics.looplag.WINDOW_S", 60, "s",
          "window of the longest lag of the loop", "older lags are forgotten"),
    Bound("snapd.kvevents.events.BLOCKS_MAX", 2_048, "",
          "pages in a KV event", "the next event goes on"),
    Bound("snapd.kvevents.events.TOKEN_IDS_MAX", 16_384, "",
          "token ids in a KV event", "the next event goes on"),
    Bound("snapd.kvevents.publisher._MESSAGE_BYTES_MAX", 1_024, "bytes",
          "a message to the socket of KV events", "ZeroMQ closes the connection"),
    Bound("snapd.server._SHARE_OF_CONNECTIONS", 2, "",
          "share of connections of a client with some rights, one in",
          "a new connection is told `limit-reached`, and closed"),
    Bound("snapd.tcplistener._SHARE_OF_HANDSHAKES", 4, "",
          "share of all handshakes for one address, one in",
          "more of its connections are closed"),
    Bound("snapd.core.session.RETRY_AFTER_MS_MIN", 20, "ms",
          "`retry_after_ms` of a refusal", "it is never shorter"),
    Bound("snapd.overviews.REST_TIMES", 20, "times",
          "rest after an overview, of the time that it took", "whoever asks meanwhile gets the former one"),
)

# Fixed in D's and P's processes.
CLIENTS: Final = (
    Bound("snapd.client.TIMEOUT_S", 5, "s",
          "a call's wait for its answer, unless said otherwise", "`RequestTimeout`"),
    Bound("snapd.exchange.IN_FLIGHT_MAX", 1_024, "",
          "calls under way on a client", "`LimitReached`; the daemon's own bound counts, too"),
    Bound("snapd.exchange.CONNECTIONS_AN_ERRAND_MAX", 2, "",
          "connections on which one call is tried", "`ConnectionLost`"),
    Bound("snapd.exchange.ENDED_MAX", 1_024, "",
          "pushes about ends that nobody has taken, a client", "the oldest goes, and is counted"),
    Bound("snapd.kv.control.ENDED_MAX", 1_024, "",
          "the same, a `Pusher`", "the oldest goes"),
    Bound("snapd.exchange.PUSHES_MAX", 1_024, "",
          "transitions that a watcher has not taken", "it reads no more, and the daemon's bound counts"),
    Bound("snapd.exchange.LAYOUTS_REMEMBERED_MAX", 256, "",
          "layouts that are declared again to a new daemon", "the oldest is forgotten"),
    Bound("snapd.exchange.HELLO_BYTES_MAX", 1 * MIB, "bytes",
          "the daemon's first frame", "`ProtocolError`"),
    Bound("snapd.links.READS_MAX", 16, "",
          "reads of the socket in one look", "the caller gets its turn"),
    Bound("snapd.links.WAIT_S_MAX", 1, "s",
          "one wait", "it is looked at again"),
    Bound("snapd.mapping._FDS_MAX", 4, "",
          "file descriptors taken from one message", "the others are closed by the kernel"),
    Bound("snapd.transport.mooncake_writer.IN_FLIGHT_BYTES_MAX", 256 * MIB, "bytes",
          "bytes in flight over Mooncake, a writer", "more waits"),
    Bound("snapd.transport.mooncake_writer.IN_FLIGHT_WRITES_MAX", 64, "",
          "writes in flight over Mooncake, a writer", "more waits"),
    Bound("snapd.transport.mooncake_writer.NOTIFICATIONS_MAX", 8, "",
          "notifications in flight, a writer", "more waits"),
    Bound("snapd.transport.mooncake_writer.TICKETS_MAX", 4_096, "",
          "sets of writes that are not polled to their end", "`TransportError`"),
    Bound("snapd.transport.mooncake_writer.CONNECT_TIMEOUT_S", 10, "s",
          "connecting over Mooncake", "`TransportError`"),
    Bound("snapd.transport.mooncake_submitter.QUEUE_MAX", 1_024, "",
          "writes handed to Mooncake's thread", "more waits"),
    Bound("snapd.transport.mooncake_feed.FEEDS_MAX", 1_024, "",
          "pushes out of a GPU that wait for their turn, a writer", "more waits"),
    Bound("snapd.transport.mooncake_engines.SEGMENTS_MAX", 1_024, "",
          "peers of one Mooncake engine", "a fresh engine is made"),
    Bound("snapd.transport.mooncake_engine.RETIRED_MAX", 4, "",
          "Mooncake engines that are not used any more", "the oldest is deleted"),
    Bound("snapd.transport.mooncake_calls.REST_S_MAX", 2, "s",
          "the end of the process, for a call into Mooncake", "it is not waited for"),
    Bound("snapd.transport.backoff.PEERS_MAX", 1_024, "",
          "peers whose failures are remembered", "the oldest is forgotten"),
    Bound("snapd.transport.backoff.REST_MAX_MS", 30_000, "ms",
          "rest of a peer that fails", "it is tried again"),
    Bound("snapd.kv.flights.LINGER_S_MAX", 120, "s",
          "drain proof after the end of a push", "it is not sent; the quarantine is over"),
    Bound("snapd.kv.flights.CLOSE_WAIT_S", 10, "s",
          "closing a `Pusher`, for what a GPU is doing",
          "it is not waited for; bytes stay in quarantine"),
    Bound("snapd.kv.gpucopy._PLANS_MAX", 64, "",
          "parts of a pool whose launches are kept on hand", "they are planned anew"),
    Bound("snapd.kv.ringfeed.UNASKED_S_MAX", 10, "s",
          "a push out of a GPU that is not stepped",
          "nothing more is written for it; stepped again, it begins anew"),
    Bound("snapd.kv.ingest._CLOSE_S", 10, "s",
          "closing an `Ingester`", "what a rank holds ends with its lease"),
    Bound("snapd.kv.ingestjob._VOTES_MAX", 2, "",
          "times that one vote is cast", "the snapshot is not inserted"),
    Bound("snapd.kv.integrity.KEY_BYTES_MAX", 4_096, "bytes",
          "an integrity key", "it is refused"),
    Bound("snapd.kv.keeper._REST_S_MAX", 5, "s",
          "the end of the process, for a thread that keeps memory", "it is not waited for"),
)
# fmt: on
