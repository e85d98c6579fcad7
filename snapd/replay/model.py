"""What P, D and the links between them can do: every figure of the model, with where it comes from.

The defaults: P and D are four H200 each, tensor parallel, as Qwen3-30B-A3B has four KV heads. One H200 could
not serve the conversation trace: it asks for 520 to 770 TFLOP/s, hour long, whatever is cached.
"""

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from snapd.core.eviction import PolicyName
from snapd.errors import ConfigError
from snapd.layout import Layout, Namespace
from snapd.units import GIB, NS_PER_S, format_bytes, parse_size_bytes

Send: TypeAlias = Literal["suffix", "hint", "session"]
Ingest: TypeAlias = Literal["eager", "on-demand", "hybrid"]
DirectAlloc: TypeAlias = Literal["free", "evict"]
BufferIn: TypeAlias = Literal["device", "host"]
Policy: TypeAlias = PolicyName | Literal["clairvoyant"]
_GB: Final = 1_000_000_000
_OUT_OF_RANGE: Final = re.compile(r"Expected `\w+` ([<>]=?) ([\d.e+]+) - at `\$\.(\w+)`")
_WORDS: Final = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
_Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
# Of the core's arena; a smaller buffer holds nothing.
ALIGNMENT_BYTES: Final = 256
BUFFER_BYTES_MIN: Final = ALIGNMENT_BYTES
BUFFER_BYTES_MAX: Final = 1 << 40


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The machines, and what is done with them.

    Attributes:
        layers, kv_heads, head_dim, kv_element_bytes: the KV of a token; Qwen3-30B-A3B in bf16: 98,304 bytes.
        query_heads: attention's work for a token is 4 * layers * query_heads * head_dim FLOP for each token
            before it.
        active_params_billion: the other work for a token is 2 FLOP for each of them.
        prefill_tflops: what P reaches: 4 H200 at 989 dense bf16, of which 40% are used.
        chunk_tokens: P computes at most so many new tokens in one step.
        step_overhead_ms: of a step, for scheduling and launches.
        kv_pool_tokens: P's: 88% of 4 x 141 GB, less 61 GB of weights, by 98,304 bytes.
        decode_pool_tokens: D's, the same.
        tpot_ms: time of an output token on D.
        link_gb_per_s: between P and D, in each direction: 4 NICs of 400 Gb/s, of which 80% are used.
        copy_gb_per_s: out of the buffer into P's slots: 4 x 1,960, measured on one H200 with random slots.
        host_copy_gb_per_s: the same from a buffer in host memory: 4 x 50, PCIe 5.
        hbm_gb_per_s: of P, that writes of others steal from: 4 x 4,800.
        buffer_bytes: of the snapshot buffer.
        buffer_in: ``device``: it is taken from P's kv_pool in the snapshot run; ``host``: it is not.
        send: what D sends after a turn: ``suffix``: what P has not prefilled itself; ``hint``: what the
            core's resident hint leaves; ``session``: all of it.
        resend: when P lacks what a suffix builds on, D sends all of it, if it still has it.
        ingest: when P takes it: ``eager``: at its next step; ``on-demand``: when the next turn is about to
            be prefilled; ``hybrid``: then, or as soon as P has free slots for it, or the buffer is fuller
            than *hybrid_fill*.
        hybrid_fill: share of the buffer.
        prepare_retries: how often D asks again when the buffer is full.
        policy: which snapshot the buffer evicts for another.
        direct_send: what D sends in the direct run: ``session`` as in the design that snapd replaces,
            which had no hint of what P holds; or ``suffix``.
        direct_alloc: ``free``: slots must be free, as in that design; ``evict``: cached ones are evicted.
        ready_ttl_ms: of the core.
        seed: of the handles; nothing else is random.
    """

    layers: _Count = 48
    kv_heads: _Count = 4
    head_dim: _Count = 128
    kv_element_bytes: _Count = 2
    query_heads: _Count = 32
    active_params_billion: _Positive = 3.3
    prefill_tflops: _Positive = 1_580.0
    chunk_tokens: _Count = 8_192
    step_overhead_ms: _Positive = 3.0
    kv_pool_tokens: _Count = 4_400_000
    decode_pool_tokens: _Count = 4_400_000
    tpot_ms: _Positive = 15.0
    link_gb_per_s: _Positive = 160.0
    copy_gb_per_s: _Positive = 7_840.0
    host_copy_gb_per_s: _Positive = 200.0
    hbm_gb_per_s: _Positive = 19_200.0
    buffer_bytes: Annotated[int, msgspec.Meta(ge=BUFFER_BYTES_MIN, le=BUFFER_BYTES_MAX)] = 8 * GIB
    buffer_in: BufferIn = "device"
    send: Send = "suffix"
    resend: bool = True
    ingest: Ingest = "eager"
    hybrid_fill: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    prepare_retries: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 3
    policy: Policy = "lru"
    direct_send: Send = "session"
    direct_alloc: DirectAlloc = "free"
    ready_ttl_ms: _Count = 300_000
    seed: Annotated[int, msgspec.Meta(ge=0)] = 1

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token: K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_element_bytes

    @property
    def buffer_tokens(self) -> int:
        """Tokens that fit the buffer."""
        return self.buffer_bytes // self.token_bytes

    @property
    def snapshot_pool_tokens(self) -> int:
        """P's kv_pool in the snapshot run.

        Raises:
            ConfigError: the buffer leaves nothing of it.
        """
        if self.buffer_in == "host":
            return self.kv_pool_tokens
        left_tokens = self.kv_pool_tokens - self.buffer_tokens
        if left_tokens <= 0:
            raise ConfigError(
                f"a buffer of {self.buffer_tokens:,} tokens leaves nothing of a kv_pool of "
                f"{self.kv_pool_tokens:,}: use a smaller one, or --buffer-in host"
            )
        return left_tokens

    def layout(self) -> Layout:
        """Return the layout of P's kv_pool, one rank for all of P's GPUs."""
        stride_bytes = self.kv_heads * self.head_dim * self.kv_element_bytes
        strides = (stride_bytes,) * self.layers
        return Layout(strides, strides, namespace=Namespace(model="replay"))

    def prefill_ns(self, first_token: int, end_tokens: int) -> int:
        """Return how long P computes for the tokens ``[first_token, end_tokens)`` of a prompt."""
        num_tokens = end_tokens - first_token
        linear_flop = 2e9 * self.active_params_billion * num_tokens
        pairs = (first_token + end_tokens) * num_tokens / 2
        attention_flop = 4.0 * self.layers * self.query_heads * self.head_dim * pairs
        return round((linear_flop + attention_flop) / (self.prefill_tflops * 1e12) * NS_PER_S)

    def copy_ns(self, num_tokens: int) -> int:
        """Return how long P copies *num_tokens* out of the buffer."""
        gb_per_s = self.copy_gb_per_s if self.buffer_in == "device" else self.host_copy_gb_per_s
        return self._bytes_ns(num_tokens, gb_per_s)

    def link_ns(self, num_tokens: int) -> int:
        """Return how long *num_tokens* are on the link."""
        return self._bytes_ns(num_tokens, self.link_gb_per_s)

    def hbm_ns(self, num_tokens: int) -> int:
        """Return how long P's memory is busy with *num_tokens* that come in from outside."""
        return self._bytes_ns(num_tokens, self.hbm_gb_per_s)

    def _bytes_ns(self, num_tokens: int, gb_per_s: float) -> int:
        return round(num_tokens * self.token_bytes / (gb_per_s * _GB) * NS_PER_S)


def buffer_bytes_of(text: str) -> int:
    """Return the size that a text such as ``8GiB`` names, if a buffer can be so large.

    Raises:
        ConfigError: it names none, or a buffer cannot.
    """
    try:
        size_bytes = parse_size_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not BUFFER_BYTES_MIN <= size_bytes <= BUFFER_BYTES_MAX:
        raise ConfigError(
            f"a buffer has {format_bytes(BUFFER_BYTES_MIN)} to "
            f"{format_bytes(BUFFER_BYTES_MAX)}, and not {size_bytes:,} bytes"
        )
    return size_bytes


def replace_checked(model: Model, **changes: object) -> Model:
    """Return *model* with other figures, checked.

    Raises:
        ConfigError: one is out of range; the message names it.
    """
    try:
        return msgspec.convert({**msgspec.structs.asdict(model), **changes}, Model)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the model cannot be so: {in_words(error)}") from None


def in_words(error: msgspec.ValidationError) -> str:
    """Return what is wrong with a figure, by its name."""
    found = _OUT_OF_RANGE.fullmatch(str(error))
    return f"{found[3]} must be {_WORDS[found[1]]} {float(found[2]):,.15g}" if found else str(error)


def parse_settings(
    settings: Sequence[str], given: Collection[str], of: type[msgspec.Struct] = Model
) -> dict[str, object]:
    """Return the figures that ``NAME=VALUE`` words set.

    Args:
        settings: the words.
        given: figures that were set otherwise already.
        of: what has them.

    Raises:
        ConfigError: a word is none, or its figure is unknown or set twice; the message names the nearest one.
    """
    known = {field.name: field for field in msgspec.structs.fields(of)}
    found: dict[str, object] = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: write NAME=VALUE")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"--set {word}: there is no {name}; {hint}")
        if name in found or name in given:
            raise ConfigError(f"--set {word}: {name} is set twice")
        found[name] = _figure(word, value, known[name].type)
    return found


def _figure(word: str, value: str, kind: object) -> object:
    if value.endswith("B"):
        try:
            return parse_size_bytes(value)
        except ValueError:
            pass
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set {word}: {error}") from None
