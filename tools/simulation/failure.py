"""What a run ends with when something is wrong."""


class Broken(AssertionError):
    """A rule was seen to be broken.

    Not a ``SnapdError``: no part of snapd that handles those may swallow it.

    Attributes:
        kind: which rule, a short name.
        detail: what was seen.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")
