"""A worker's side: a thread that loads and pushes while the engine steps, or is idle.

The engine hands orders over and asks what has ended; it never waits for the thread. Everything that is asked
of the daemon, and every byte that moves, is the thread's.

Source: design, sections 8 and 9.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog
import torch

from snapd.client import Client
from snapd.engines.support import read_integrity
from snapd.engines.vllm.gate import Gate, Warner
from snapd.engines.vllm.orders import LoadOrder, Orders, PushOrder
from snapd.engines.vllm.settings import VllmSettings
from snapd.engines.vllm.tally import OK, Counts, Tally
from snapd.errors import ConnectionProblem, Reason, SnapdError
from snapd.kv.control import ClientControl
from snapd.kv.ingest import Ingester, IngestJob
from snapd.kv.integrity import check_on_host
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushJob
from snapd.layout import Layout, Namespace

# What one step of the thread moves, so that loads need not wait for a whole push.
STEP_BYTES: Final = 16 * 1024 * 1024
# Loads that are under way at a time: while one waits for other ranks, the next can be copied.
LOADS_MAX: Final = 4
# Layouts that wait for a daemon to be declared to.
LAYOUTS_MAX: Final = 128
# How often the thread looks again when all that is under way waits for somebody else.
_POLL_S: Final = 0.001
_CLOSE_S: Final = 10.0

_log: Final = structlog.get_logger("snapd.engines")

Events = Sequence[torch.cuda.Event] | None


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    after: Events
    begun_s: float
    deadline_s: float
    job: IngestJob | None = None


@dataclass(slots=True)
class _Push:
    order: PushOrder
    after: Events
    begun_s: float
    deadline_s: float
    job: PushJob | None = None


@dataclass(slots=True)
class _Target:
    """A daemon that D pushes to."""

    client: Client
    gate: Gate
    pusher: Pusher


def slots_of(block_ids: Sequence[int], block_tokens: int) -> torch.Tensor:
    """Return the slots of blocks, int64, shape [len(block_ids) * block_tokens]."""
    starts = torch.tensor(block_ids, dtype=torch.int64) * block_tokens
    return (starts[:, None] + torch.arange(block_tokens)).flatten()


class OrderedBlocks:
    """A ``KVOwner`` for whom the scheduler has decided already: what is resident, and which blocks to fill.

    An ingest asks for both when it is made, so it is told whose they are just before. The scheduler inserts:
    it caches the blocks when all workers have loaded, and computes them when one has not.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.order: LoadOrder | None = None

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Return what the scheduler holds; it holds on to it."""
        del session_id, token_ids
        assert self.order is not None
        return self.order.resident_tokens

    def unlock_prefix(self, session_id: str) -> None:
        """Do nothing."""

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return the slots of the order's blocks."""
        assert self.order is not None
        slots = slots_of(self.order.block_ids, self._block_tokens)
        return slots if slots.numel() == num_tokens else None

    def free(self, slots: torch.Tensor) -> None:
        """Do nothing: the scheduler is told of the blocks that failed."""

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Do nothing: the scheduler is told that the load has ended."""


class WorkerSide:
    """Loads into and pushes out of one rank's pool.

    Args:
        pool: the rank's KV cache.
        namespace: what every request's namespace is made of.
        settings: the operator's.
        rank: this worker's.
        num_ranks: how many workers share every attempt.
        is_producer, is_consumer: what this engine does.
        name: says in the daemon's log who this is.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the integrity key is no good, or the pool is on a GPU and there is one.
        ExtraMissing: a package that the integrity key needs is not installed.
    """

    def __init__(
        self,
        pool: KVPool,
        namespace: Namespace,
        settings: VllmSettings,
        *,
        rank: int,
        num_ranks: int,
        is_producer: bool,
        is_consumer: bool,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self._pool = pool
        self._namespace = namespace
        self._settings = settings
        self._rank = rank
        self._num_ranks = num_ranks
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._name = f"{name} rank {rank}"
        self._clock = clock
        self._warner = Warner(clock)
        self._integrity = read_integrity(settings)
        if self._integrity is not None:
            check_on_host(pool.device)
        # What both threads touch, under the condition's lock.
        self._changed = threading.Condition()
        self._new_loads: deque[_Load] = deque()
        self._new_pushes: deque[_Push] = deque()
        self._new_layouts: deque[Layout] = deque()
        self._sent: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._is_closed = False
        # The thread's own.
        self._loads: list[_Load] = []
        self._undeclared: deque[Layout] = deque(maxlen=LAYOUTS_MAX)
        self._blocks = OrderedBlocks(pool.page_size_tokens)
        self._ingester: Ingester | None = None
        self._p_client = Client(settings.socket_path, timeout_s=settings.timeout_s, name=self._name)
        self._p_gate = Gate(settings.socket_path, settings.retry_s, clock)
        self._targets: dict[str, _Target] = {}
        self._next_care_s = 0.0
        self._thread = threading.Thread(target=self._run, name="snapd", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # --- what the engine calls ---------------------------------------------------------------------

    def take(self, orders: Orders, after: Events = None) -> None:
        """Take a step's orders over.

        Args:
            orders: from the scheduler's side.
            after: for a pool on a GPU: an event behind the forward passes that wrote what is pushed, and that
                may still read or write what is loaded into.
        """
        if orders.is_empty:
            return
        now_s = self._clock()
        with self._changed:
            for load in orders.loads:
                self._new_loads.append(_Load(load, after, now_s, now_s + self._settings.load_timeout_s))
            for push in orders.pushes:
                if push.grant is None:
                    self._sent.add(push.request_id)
                else:
                    self._new_pushes.append(_Push(push, after, now_s, now_s + self._settings.hold_s))
            self._new_layouts.extend(orders.layouts)
            self._changed.notify_all()

    def finished(self) -> tuple[set[str], set[str]]:
        """Return, once, whose blocks are held no longer, and whose load has ended, well or not."""
        with self._changed:
            sent, self._sent = self._sent, set()
            loaded, self._loaded = self._loaded, set()
        return sent, loaded

    def failed_blocks(self) -> set[int]:
        """Return, once, the blocks whose load failed. Not before ``finished`` was asked in the same step."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_counts(self) -> Counts:
        """Return what was counted since the last call."""
        return self.tally.take()

    def close(self) -> None:
        """End what is under way, and the thread. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.set_device(self._pool.device)
        try:
            while not self._is_closed:
                self._guarded(self._care)
                self._guarded(self._step)
        finally:
            self._guarded(self._close)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something; a bug in it must not end the thread, as blocks would be held for ever."""
        try:
            act()
        except Exception as error:
            if self._warner.warn("a bug in the connector", error=repr(error)):
                _log.exception("a bug in the connector: please report it with the lines below")
            self.tally.count("problems", type(error).__name__)
            with self._changed:
                self._changed.wait(_POLL_S)

    def _step(self) -> None:
        """Do a little of everything that is under way, or wait for something to do."""
        self._declare()
        is_moving = self._step_loads()
        is_moving |= self._step_push()
        if is_moving:
            return
        with self._changed:
            if self._is_closed or (self._new_loads and len(self._loads) < LOADS_MAX):
                return
            if self._loads or self._new_pushes:
                self._changed.wait(_POLL_S)
            else:
                self._changed.wait(self._idle_s())

    def _idle_s(self) -> float:
        """Return how long nothing has to be done, unless the engine hands something over."""
        is_lingering = any(target.pusher.lingering for target in self._targets.values())
        return 5 * _POLL_S if is_lingering else max(_POLL_S, self._next_care_s - self._clock())

    def _care(self) -> None:
        """Now and then: be connected, as the daemon may have been restarted; look after what has ended."""
        now_s = self._clock()
        for target in self._targets.values():
            if target.pusher.lingering:
                target.pusher.poll()
        if now_s < self._next_care_s:
            return
        self._next_care_s = now_s + self._settings.retry_s
        if self._is_consumer:
            self._greet_as_p()
        if self._is_producer:
            self._greet_as_d()

    @contextlib.contextmanager
    def _asking(self, gate: Gate) -> Iterator[None]:
        """Leave the daemon alone for a while if it cannot be asked."""
        try:
            yield
        except ConnectionProblem as error:
            gate.failed(error)
            self.tally.count("problems", type(error).__name__)
        except SnapdError as error:
            self._warner.warn("this daemon cannot be used as it is", address=gate.address, error=str(error))
            self.tally.count("problems", type(error).__name__)
        else:
            gate.passed()

    def _greet_as_p(self) -> None:
        if not self._p_gate.is_open:
            return
        if self._ingester is None:
            self._make_ingester()
            return
        with self._asking(self._p_gate):
            # Connects anew, and then declares the layouts again, if the daemon was restarted.
            self._p_client.connect()
            self._ingester.reap()

    def _make_ingester(self) -> None:
        with self._asking(self._p_gate):
            self._ingester = Ingester(
                self._p_client,
                self._rank,
                self._pool,
                self._blocks,
                self._namespace,
                keep_on_alloc_failure=False,
                keep_on_missing_prefix=False,
                verify=self._settings.verify,
                integrity=self._integrity,
            )

    def _greet_as_d(self) -> None:
        """Have what the configured daemon's pushes need, so that the first push does not wait for it."""
        target = self._target(self._settings.socket_path)
        if target.gate.is_open:
            with self._asking(target.gate):
                target.pusher.connect()

    def _target(self, address: str) -> _Target:
        target = self._targets.get(address)
        if target is None:
            client = Client(address, timeout_s=self._settings.timeout_s, name=self._name)
            # Other ranks of the same attempts are written by other processes.
            control = ClientControl(client, self._rank if self._num_ranks > 1 else None)
            pool = {self._rank: self._pool}
            pusher = Pusher(control, pool, self._namespace, integrity=self._integrity)
            target = _Target(client, Gate(address, self._settings.retry_s, self._clock), pusher)
            self._targets[address] = target
        return target

    def _declare(self) -> None:
        """Declare what is new; what could not be said is said when the daemon is asked again."""
        with self._changed:
            self._undeclared.extend(self._new_layouts)
            self._new_layouts.clear()
        while self._undeclared and self._p_gate.is_open:
            layout = self._undeclared.popleft()
            with self._asking(self._p_gate):
                try:
                    self._p_client.declare_layout(self._rank, layout)
                except ConnectionProblem:
                    self._undeclared.appendleft(layout)
                    raise

    # --- loads -------------------------------------------------------------------------------------

    def _step_loads(self) -> bool:
        """Begin and step loads; return whether bytes moved or one has ended."""
        with self._changed:
            while self._new_loads and len(self._loads) < LOADS_MAX:
                self._loads.append(self._new_loads.popleft())
        is_moving = False
        for load in tuple(self._loads):
            try:
                reason = self._step_load(load)
            except Exception:
                # A copy that runs on a GPU still writes to the blocks: its end is waited for.
                if load.job is None or not load.job.is_on_device:
                    self._end_load(load, "bug")
                raise
            if reason:
                self._end_load(load, reason)
            is_moving |= bool(reason) or not (load.job and (load.job.is_waiting or load.job.is_on_device))
        return is_moving

    def _step_load(self, load: _Load) -> str:
        """Do a step; return how the load has ended, or nothing."""
        if load.job is None:
            # The order is here as the daemon has answered the scheduler.
            is_worth_a_try = self._p_gate.is_worth_a_try(load.begun_s)
            if is_worth_a_try and self._ingester is None:
                self._make_ingester()
            if not is_worth_a_try or self._ingester is None:
                return "daemon-unreachable"
            load.job = self._begin_load(self._ingester, load)
        job = load.job
        if job.done or job.step(STEP_BYTES):
            return OK if job.result.ok else str(job.result.reason)
        if self._clock() < load.deadline_s:
            return ""
        if job.cancel():
            # A copy that runs on a GPU still writes to the blocks.
            return "load-timeout" if job.done else ""
        # The vote is cast, so every byte has been copied. Whatever the other ranks hear, this one says that
        # its blocks failed, and then all of them compute.
        return "load-timeout"

    def _begin_load(self, ingester: Ingester, load: _Load) -> IngestJob:
        order = load.order
        begun_s = self._clock()
        self._blocks.order = order
        job = ingester.start(
            order.session_id,
            order.token_ids,
            order.slab_handle,
            wanted_tokens=order.wanted_tokens,
            layout_fingerprint=order.layout_fingerprint,
            after=load.after if self._pool.device.type == "cuda" else None,
        )
        if job.done and self._clock() - begun_s >= self._settings.timeout_s:
            # Others need not wait as long for the same.
            self._p_gate.failed(ConnectionProblem(f"no lease within {self._settings.timeout_s} s"))
        return job

    def _end_load(self, load: _Load, reason: str) -> None:
        self._loads.remove(load)
        order = load.order
        if not order.request_id:
            return
        self.tally.count("loads", reason)
        if reason == OK:
            assert load.job is not None
            self.tally.count("loaded_tokens", amount=order.wanted_tokens - order.resident_tokens)
            self.tally.count("loaded_bytes", amount=load.job.times.bytes)
            self.tally.count("load_seconds", amount=self._clock() - load.begun_s)
        else:
            self._warner.warn(
                "a snapshot could not be loaded; its tokens are computed",
                reason=reason, session_id=order.session_id, slab_handle=order.slab_handle,
            )  # fmt: skip
        with self._changed:
            if reason != OK:
                self._failed_blocks.update(order.block_ids)
            self._loaded.add(order.request_id)

    # --- pushes ------------------------------------------------------------------------------------

    def _step_push(self) -> bool:
        """Step the push whose turn it is; return whether bytes moved or it has ended."""
        with self._changed:
            if not self._new_pushes:
                return False
            push = self._new_pushes[0]
        before_bytes = push.job.bytes_done if push.job is not None else -1
        try:
            reason = self._advance_push(push)
        except Exception:
            self._end_push(push, "bug")
            if push.job is not None:
                push.job.cancel()
            raise
        if reason:
            self._end_push(push, reason)
        return bool(reason) or push.job is None or push.job.bytes_done > before_bytes

    def _advance_push(self, push: _Push) -> str:
        """Do a step; return how the push has ended, or nothing."""
        if push.job is None:
            target = self._target(push.order.socket_path)
            if not target.gate.is_worth_a_try(push.begun_s):
                return "daemon-unreachable"
            push.job = self._begin_push(target, push)
        job = push.job
        if not job.done and self._clock() >= push.deadline_s:
            job.cancel()
            return "held-too-long"
        if not job.done and not job.step(STEP_BYTES):
            return ""
        result = job.result
        if result.ok:
            self.tally.count("pushed_tokens", amount=result.num_tokens)
            self.tally.count("pushed_bytes", amount=result.bytes)
            self.tally.count("push_seconds", amount=self._clock() - push.begun_s)
            return OK
        self._warner.warn(
            "a push failed; the next turn is computed", reason=str(result.reason), detail=result.detail
        )
        return str(result.reason)

    def _begin_push(self, target: _Target, push: _Push) -> PushJob:
        grant = push.order.grant
        assert grant is not None
        block_tokens = self._pool.page_size_tokens
        if self._num_ranks > 1:
            grant = msgspec.structs.replace(grant, ranks=(grant.for_rank(self._rank),))
        first, last = (
            grant.token_start // block_tokens,
            (grant.token_start + grant.num_tokens) // block_tokens,
        )
        begun_s = self._clock()
        job = target.pusher.start_granted(
            grant,
            slots_of(push.order.block_ids[first:last], block_tokens),
            after=push.after if self._pool.device.type == "cuda" else None,
        )
        if job.done and self._clock() - begun_s >= self._settings.timeout_s:
            target.gate.failed(ConnectionProblem(f"no answer within {self._settings.timeout_s} s"))
        return job

    def _end_push(self, push: _Push, reason: str) -> None:
        self.tally.count("pushes", reason)
        with self._changed:
            self._new_pushes.remove(push)
            self._sent.add(push.order.request_id)

    # --- the end -----------------------------------------------------------------------------------

    def _close(self) -> None:
        for load in self._loads:
            if load.job is not None:
                load.job.cancel()
        with self._changed:
            push = self._new_pushes[0] if self._new_pushes else None
        if push is not None and push.job is not None:
            push.job.cancel(Reason.SESSION_NOT_RESIDENT)
        for target in self._targets.values():
            target.pusher.close()
            target.client.close()
        if self._ingester is not None:
            self._ingester.close()
        self._p_client.close()
