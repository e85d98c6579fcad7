"""How often an address may come, in bounded memory."""

import ipaddress
from collections import OrderedDict
from typing import Final

# What may come at once, in seconds of the rate.
BURST_S: Final = 10
# Whoever has one IPv6 address has all those that begin alike.
_IPV6_PREFIX_BITS: Final = 64


class AddressLimiter:
    """A token bucket for each address.

    Args:
        per_s: what an address may do a second, over time.
        addresses_max: are remembered; whoever was not seen for longest is forgotten, with a full allowance.
    """

    def __init__(self, per_s: int, addresses_max: int) -> None:
        self._addresses_max = addresses_max
        self._per_s = per_s
        self._most = float(per_s * BURST_S)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def admit(self, address: str, now_s: float) -> bool:
        """Take one token of *address*; False: it has none left."""
        key = network_of(address)
        tokens, last_s = self._buckets.pop(key, (self._most, now_s))
        tokens = min(self._most, tokens + max(0.0, now_s - last_s) * self._per_s)
        is_admitted = tokens >= 1.0
        self._buckets[key] = (tokens - is_admitted, now_s)
        if len(self._buckets) > self._addresses_max:
            self._buckets.popitem(last=False)
        return is_admitted


def network_of(address: str) -> str:
    """Return what stands for *address* when it is counted: itself, or of IPv6 its first half."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed), _IPV6_PREFIX_BITS), strict=False).network_address)
    return str(parsed)
