"""The scheduler's side: what a request may start from, and where the KV of one that has finished goes.

Nothing here waits longer than ``answer_wait_s`` in a step: a call that is not answered by then is looked at
again in a later step. While a request waits for an answer, or its blocks are held, vLLM keeps stepping.

Source: design, sections 5 and 9.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import structlog

from snapd import calls
from snapd.address import parse_address
from snapd.calls import Call, Grant
from snapd.client import Client, Pending
from snapd.engines.vllm.gate import Gate, Warner
from snapd.engines.vllm.matching import Choice, choose, is_orphan, loadable_tokens, pushable_tokens
from snapd.engines.vllm.naming import PARAMS_KEY, Asked, default_session_id, namespace_of, read_asked
from snapd.engines.vllm.orders import LoadOrder, Orders, PushOrder
from snapd.engines.vllm.requests import Daemon, Preparing, RequestView, Waiting
from snapd.engines.vllm.settings import VllmSettings
from snapd.engines.vllm.tally import Tally
from snapd.errors import ConnectionProblem, Reason, RequestError, RequestTimeout, SnapdError
from snapd.kvevents.hashes import pack_token_ids
from snapd.layout import Layout, fingerprint, page_keys, token_digest
from snapd.wire import LookupRep

# Namespaces that P has declared lately; a daemon has room for 256 by default.
NAMESPACES_MAX: Final = 128
# The daemon's default for page_keys_max, for as long as it has not said its own.
_PAGE_KEYS_MAX: Final = 16_384
# Of new requests, so many tokens are hashed in a step, or one request's: about 15 ms.
HASHED_TOKENS_MAX: Final = 200_000
_ADDRESS_CHARS_MAX: Final = 200

_log: Final = structlog.get_logger("snapd.engines")


class SchedulerSide:
    """Decides for all workers.

    Args:
        settings: the operator's.
        block_tokens: tokens in a block.
        ranks: P or D workers, each with a shard of its own.
        is_producer, is_consumer: what this engine does.
        name: says in the daemon's log who this is.
        is_one_process: the scheduler's process is the only one that writes, so its exit is drain proof.
        clock: seconds, monotonic.

    Raises:
        ConfigError: an address is none.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        block_tokens: int,
        ranks: Sequence[int],
        is_producer: bool,
        is_consumer: bool,
        name: str,
        is_one_process: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in (settings.socket_path, *settings.socket_paths):
            parse_address(address)
        self.tally = Tally()
        self._settings = settings
        self._block_tokens = block_tokens
        self._ranks = tuple(ranks)
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._name = name
        self._is_one_process = is_one_process
        self._clock = clock
        self._warner = Warner(clock)
        self._daemons: dict[str, Daemon] = {}
        self._layout: Layout | None = None
        self._resets = 0
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._waiting: dict[str, Waiting] = {}
        self._preparing: list[Preparing] = []
        self._held: set[str] = set()
        # Whose blocks are being filled, also of requests that have ended meanwhile.
        self._loading: set[str] = set()
        # Requests that the engine has, and those of them that were there before all was forgotten.
        self._live: set[str] = set()
        self._outdated: set[str] = set()
        self._loads: list[LoadOrder] = []
        self._pushes: list[PushOrder] = []
        self._layouts: list[Layout] = []
        self._wait_left_s = settings.answer_wait_s
        self._hash_left_tokens = HASHED_TOKENS_MAX
        self._first_match_s = 0.0

    def set_layout(self, layout: Layout) -> None:
        """Take note of the workers' layout; nothing is loaded or pushed before."""
        self._layout = layout

    @property
    def has_layout(self) -> bool:
        """The workers' layout is known."""
        return self._layout is not None

    def arrived(self, request_id: str) -> None:
        """Take note of a request; ``finished`` takes leave of it."""
        self._live.add(request_id)

    # --- P -----------------------------------------------------------------------------------------

    def match(self, request: RequestView, resident_tokens: int) -> int | None:
        """Return how many tokens past *resident_tokens* can be loaded; None: ask again in the next step."""
        if self._is_layout_to_come():
            return None
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            if self._hash_left_tokens <= 0:
                return None
            waiting = self._begin(request, resident_tokens)
            if waiting is None:
                return 0
        if waiting.is_loading:
            return 0  # It was tried, and failed.
        if not waiting.is_decided and not self._look(request, waiting, resident_tokens):
            return None
        return self._external_tokens(waiting, resident_tokens)

    def _is_layout_to_come(self) -> bool:
        """Return whether the first request should wait for the step that brings the layout."""
        if self._layout is not None or not self._is_consumer:
            return False
        self._first_match_s = self._first_match_s or self._clock()
        return self._clock() - self._first_match_s < self._settings.timeout_s

    def _begin(self, request: RequestView, resident_tokens: int) -> Waiting | None:
        """Begin to look for a snapshot; None: there is no use in it."""
        if not self._is_consumer or self._layout is None or not request.is_plain:
            return None
        asked = self._asked(request)
        layout, name = self._namespace(request, self._layout)
        most_tokens = loadable_tokens(request.num_tokens, self._block_tokens) - resident_tokens
        if not asked.load or most_tokens < max(1, self._settings.min_load_tokens):
            return None
        waiting = Waiting(asked, layout, name)
        self._waiting[request.request_id] = waiting
        self._hash_left_tokens -= request.num_tokens
        call = calls.lookup(
            name,
            page_keys=self._page_keys(request.tokens(), self._settings.socket_path),
            resident_tokens=resident_tokens,
            timeout_s=self._settings.timeout_s,
        )
        self._ask(waiting, call)
        return waiting

    def _page_keys(self, token_ids: list[int], address: str) -> tuple[str, ...]:
        """Return the keys of the first pages, as many as the daemon takes."""
        page_keys_max = _PAGE_KEYS_MAX
        with contextlib.suppress(SnapdError):
            page_keys_max = self._daemon(address).client.hello.page_keys_max
        return page_keys(token_ids[: page_keys_max * self._block_tokens], self._block_tokens)

    def _ask(self, waiting: Waiting, call: Call[LookupRep]) -> None:
        daemon = self._daemon(self._settings.socket_path)
        waiting.lookup = None
        if not daemon.gate.is_open:
            self._decide(waiting, None, "daemon-resting")
            return
        try:
            waiting.lookup = daemon.client.submit(call)
        except SnapdError as error:
            self._decide(waiting, None, self._problem(daemon, error))

    def _look(self, request: RequestView, waiting: Waiting, resident_tokens: int) -> bool:
        """Look for the answer, a moment at most; return whether all is known."""
        while waiting.lookup is not None:
            daemon = self._daemon(self._settings.socket_path)
            try:
                found = self._answer(waiting.lookup)
            except SnapdError as error:
                self._decide(waiting, None, self._problem(daemon, error))
                break
            if found is None:
                return False
            daemon.gate.passed()
            self._take(request, waiting, found, resident_tokens)
        return waiting.is_decided

    def _take(self, request: RequestView, waiting: Waiting, found: LookupRep, resident_tokens: int) -> None:
        """Take the answer up, which may be to ask once more, by session."""
        session_id = waiting.asked.session_id
        choice = choose(
            found,
            is_by_session=waiting.is_by_session,
            session_id=session_id,
            num_tokens=request.num_tokens,
            resident_tokens=resident_tokens,
            block_tokens=self._block_tokens,
            ranks=self._ranks,
            least_tokens=self._settings.min_load_tokens,
        )
        if choice is not None:
            self._decide(waiting, choice, "found")
        elif session_id and not waiting.is_by_session:
            waiting.is_by_session = True
            call = calls.lookup(
                waiting.layout_fingerprint, session_id=session_id, timeout_s=self._settings.timeout_s
            )
            self._ask(waiting, call)
        else:
            if waiting.is_by_session and is_orphan(found, request.num_tokens, resident_tokens):
                self._end_orphan(request, waiting, found, resident_tokens)
            self._decide(waiting, None, "of-no-use" if found.slab_handle else "nothing")

    def _end_orphan(
        self, request: RequestView, waiting: Waiting, found: LookupRep, resident_tokens: int
    ) -> None:
        """Have a suffix ended whose prefix P has evicted, so that D's next push is full."""
        self._loads.append(
            LoadOrder(
                request_id="",
                session_id=found.session_id,
                slab_handle=found.slab_handle,
                layout_fingerprint=waiting.layout_fingerprint,
                token_ids=request.tokens()[: found.token_start + found.num_tokens],
                resident_tokens=resident_tokens,
                wanted_tokens=resident_tokens,
                block_ids=[],
            )
        )

    def _decide(self, waiting: Waiting, choice: Choice | None, outcome: str) -> None:
        waiting.lookup = None
        waiting.is_decided = True
        waiting.choice = choice
        self.tally.count("lookups", outcome)

    def _external_tokens(self, waiting: Waiting, resident_tokens: int) -> int:
        """Return what the choice gives now: P may have evicted or computed blocks since it was made."""
        choice = waiting.choice
        if choice is None or choice.token_start > resident_tokens:
            return 0
        more_tokens = choice.wanted_tokens - resident_tokens
        return more_tokens if more_tokens >= max(1, self._settings.min_load_tokens) else 0

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Take note of the blocks that a request got; those of *num_external_tokens* are to be loaded."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.is_loading or not num_external_tokens:
            return
        choice = waiting.choice
        assert choice is not None
        resident_tokens = choice.wanted_tokens - num_external_tokens
        waiting.is_loading = True
        self._loading.add(request.request_id)
        first, last = resident_tokens // self._block_tokens, choice.wanted_tokens // self._block_tokens
        self._loads.append(
            LoadOrder(
                request_id=request.request_id,
                session_id=choice.session_id,
                slab_handle=choice.slab_handle,
                layout_fingerprint=waiting.layout_fingerprint,
                token_ids=request.tokens()[: choice.checked_tokens],
                resident_tokens=resident_tokens,
                wanted_tokens=choice.wanted_tokens,
                block_ids=list(block_ids[first:last]),
            )
        )

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Take note that the loads of these requests have ended on every worker, well or not."""
        self._loading.difference_update(request_ids)

    # --- D -----------------------------------------------------------------------------------------

    def finished(self, request: RequestView, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take leave of a request; return whether its blocks are held, and what the response says."""
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is not None and waiting.lookup is not None:
            waiting.lookup.forget()
        is_outdated = request.request_id in self._outdated
        self._live.discard(request.request_id)
        self._outdated.discard(request.request_id)
        if not self._is_producer or self._layout is None:
            return False, None
        asked = self._asked(request)
        num_tokens = pushable_tokens(request.num_tokens, request.num_computed_tokens, self._block_tokens)
        address = asked.socket_path or self._settings.socket_path
        why_not = "outdated" if is_outdated else ""
        why_not = why_not or self._why_not(request, asked, address, num_tokens, len(block_ids))
        answer: dict[str, Any] = {
            "session_id": asked.session_id or default_session_id(request.request_id),
            "tokens": num_tokens,
            "slab_handle": 0,
        }
        if why_not:
            if why_not in ("too-many-held", "socket-not-allowed"):
                self.tally.count("pushes", why_not)
            return False, {PARAMS_KEY: answer | {"reason": why_not}}
        reason, grant = self._prepare(request, address, answer["session_id"], num_tokens, block_ids)
        if reason:
            self.tally.count("pushes", reason)
            return False, {PARAMS_KEY: answer | {"reason": reason}}
        self._held.add(request.request_id)
        return True, {PARAMS_KEY: answer | {"slab_handle": grant.slab_handle if grant else 0}}

    def _why_not(
        self, request: RequestView, asked: Asked, address: str, num_tokens: int, num_blocks: int
    ) -> str:
        """Return why the KV is not sent, or nothing."""
        least_tokens = max(self._block_tokens, self._settings.min_push_tokens)
        # A request that ended before its first token was given up while it was computed or loaded.
        if not asked.push or not request.is_plain or not request.num_output_tokens:
            return "not-wanted"
        if request.request_id in self._loading:
            # Given up while its blocks are being filled: they are held for that, and hold nothing yet.
            return "still-loading"
        if num_tokens < least_tokens or num_blocks * self._block_tokens < num_tokens:
            return "too-short"
        if address not in (self._settings.socket_path, *self._settings.socket_paths):
            self._warner.warn(
                "a request names a daemon that is not among socket_paths; it is not pushed",
                address=address[:_ADDRESS_CHARS_MAX],
            )
            return "socket-not-allowed"
        if len(self._held) >= self._settings.held_requests_max:
            return "too-many-held"
        return ""

    def _prepare(
        self,
        request: RequestView,
        address: str,
        session_id: str,
        num_tokens: int,
        block_ids: Sequence[int],
    ) -> tuple[str, Grant | None]:
        """Ask for a slab; return why there is none, or what was granted if the answer is here by now."""
        assert self._layout is not None
        daemon = self._daemon(address)
        if not daemon.gate.is_open:
            return "daemon-resting", None
        _, name = self._namespace(request, self._layout)
        token_ids = request.tokens()[:num_tokens]
        call = calls.prepare_receive(
            session_id,
            num_tokens,
            name,
            token_digest=token_digest(token_ids),
            page_keys=self._page_keys(token_ids, address),
            ranks=self._ranks,
            use_resident_hint=self._settings.use_resident_hint,
            is_only_writer=self._is_one_process,
            token_ids=self._for_events(daemon, token_ids),
            timeout_s=self._settings.timeout_s,
        )
        try:
            pending = daemon.client.submit(call)
            preparing = Preparing(request.request_id, address, pending, list(block_ids), num_tokens)
            grant = self._answer(pending)
        except SnapdError as error:
            return self._problem(daemon, error), None
        if grant is None:
            self._preparing.append(preparing)
        else:
            daemon.gate.passed()
            self._order(preparing, grant)
        return "", grant

    def _for_events(self, daemon: Daemon, token_ids: list[int]) -> bytes:
        """Return the token ids that the daemon wants for its KV events, packed; none before it said so."""
        if self._settings.send_token_ids:
            with contextlib.suppress(SnapdError):
                wanted = daemon.client.hello.kv_events
                if wanted is not None:
                    return pack_token_ids(token_ids[: wanted.token_ids_max])
        return b""

    def _order(self, preparing: Preparing, grant: Grant | None) -> None:
        num_blocks = preparing.num_tokens // self._block_tokens
        self._pushes.append(
            PushOrder(
                request_id=preparing.request_id,
                socket_path=preparing.address,
                grant=grant,
                block_ids=preparing.block_ids[:num_blocks],
            )
        )

    def _look_after_prepares(self) -> None:
        """See which slabs were granted since; of those that were not, the blocks are given back."""
        waiting, self._preparing = self._preparing, []
        for preparing in waiting:
            daemon = self._daemon(preparing.address)
            try:
                grant = preparing.pending.poll()
            except SnapdError as error:
                self.tally.count("pushes", self._problem(daemon, error))
                self._order(preparing, None)
                continue
            if grant is None:
                self._preparing.append(preparing)
            else:
                daemon.gate.passed()
                self._order(preparing, grant)

    def sent(self, request_ids: Iterable[str]) -> None:
        """Take note that the blocks of these requests are held no longer."""
        self._held.difference_update(request_ids)

    # --- each step ---------------------------------------------------------------------------------

    def orders(self) -> Orders:
        """Return, once, what the workers are to do. Called once a step."""
        self._wait_left_s = self._settings.answer_wait_s
        self._hash_left_tokens = HASHED_TOKENS_MAX
        self._look_after_prepares()
        orders = Orders(loads=self._loads, pushes=self._pushes, layouts=self._layouts)
        self._loads, self._pushes, self._layouts = [], [], []
        return orders

    def forget_all(self) -> None:
        """Use nothing that was computed until now: the weights may be others.

        What the daemon has is of another namespace from here on. D and P have to be told equally often.
        What requests have that are here now may be of both, so it is not pushed.
        """
        self._resets += 1
        self._outdated |= self._live
        self._known.clear()
        for waiting in self._waiting.values():
            if waiting.lookup is not None:
                waiting.lookup.forget()
                waiting.lookup = None
            waiting.is_decided = True
            waiting.choice = None

    def close(self) -> None:
        """Hang up."""
        for daemon in self._daemons.values():
            daemon.client.close()

    # --- what all share ----------------------------------------------------------------------------

    def _asked(self, request: RequestView) -> Asked:
        asked, problem = read_asked(request.params)
        if problem:
            self._warner.warn("a request's kv_transfer_params cannot be used", problem=problem)
        return asked

    def _namespace(self, request: RequestView, base: Layout) -> tuple[Layout, str]:
        """Return the layout of a request's namespace and its fingerprint; P declares one that is new."""
        namespace = namespace_of(
            base.namespace, lora=request.lora, cache_salt=request.cache_salt, resets=self._resets
        )
        layout = Layout(
            k_stride_bytes=base.k_stride_bytes,
            v_stride_bytes=base.v_stride_bytes,
            dtype=base.dtype,
            page_size_tokens=base.page_size_tokens,
            namespace=namespace,
        )
        key = (namespace.lora, namespace.cache_salt)
        if self._is_consumer and key not in self._known:
            self._layouts.append(layout)
        self._known[key] = None
        self._known.move_to_end(key)
        while len(self._known) > NAMESPACES_MAX:
            self._known.popitem(last=False)
        return layout, fingerprint(layout)

    def _daemon(self, address: str) -> Daemon:
        daemon = self._daemons.get(address)
        if daemon is None:
            client = Client(address, timeout_s=self._settings.timeout_s, name=f"{self._name} scheduler")
            daemon = Daemon(client, Gate(address, self._settings.retry_s, self._clock))
            self._daemons[address] = daemon
        return daemon

    def _answer(self, pending: "Pending[Any]") -> Any:
        """Return the answer, or None if it does not come within what this step may still wait.

        Raises:
            SnapdError: the call failed.
        """
        if self._wait_left_s <= 0:
            return pending.poll()
        begun_s = self._clock()
        try:
            return pending.wait(self._wait_left_s)
        except RequestTimeout:
            return pending.poll()
        finally:
            self._wait_left_s -= self._clock() - begun_s

    def _problem(self, daemon: Daemon, error: SnapdError) -> str:
        """Take note of a call that failed, and return its reason."""
        if isinstance(error, RequestError):
            daemon.gate.passed()
            if error.reason is Reason.LAYOUT_MISMATCH:
                self._warner.warn("no P has declared the layout of this D; nothing is sent", error=str(error))
            return str(error.reason)
        if isinstance(error, ConnectionProblem):
            daemon.gate.failed(error)
            self.tally.count("problems", type(error).__name__)
            return "daemon-unreachable"
        self._warner.warn("a call to the daemon failed", error=str(error))
        self.tally.count("problems", type(error).__name__)
        return "call-failed"
