"""The files in schemas/ are what the code says, and real messages satisfy them."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from snapd import wire as w
from snapd.errors import Reason
from tools.make_schemas import DIRECTORY, schemas


def test_every_schema_file_is_current() -> None:
    """A change of a record, message or setting without `make schemas` fails here."""
    on_disk = {path.name: json.loads(path.read_text()) for path in DIRECTORY.glob("*.json")}
    assert on_disk == json.loads(json.dumps(schemas()))


@pytest.mark.parametrize("name", sorted(schemas()))
def test_every_schema_is_a_valid_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schemas()[name])


def _valid(name: str, message: Any) -> bool:
    validator = jsonschema.Draft202012Validator(schemas()[name])
    return bool(validator.is_valid(json.loads(msgspec.json.encode(message))))


def test_a_request_satisfies_its_schema_and_a_wrong_one_does_not() -> None:
    commit = w.CommitReq(
        id=1, slab_handle=2, rank=0, num_bytes=3, num_tokens=4, checksums=((2**64 - 1, 0), (5, 6))
    )
    assert _valid("request.schema.json", commit)
    assert not _valid("request.schema.json", {"type": "CommitReq", "id": 1})
    assert not _valid("request.schema.json", {"type": "NoSuchReq", "id": 1})


def test_a_reply_satisfies_its_schema_and_an_unknown_reason_does_not() -> None:
    refused = w.SnapshotPrepareReceiveReqOutput(
        id=1, ok=False, reason=Reason.SNAPSHOT_BUF_FULL, retry_after_ms=20
    )
    assert _valid("reply.schema.json", refused)
    assert not _valid("reply.schema.json", {"type": "ErrorRep", "id": 1, "reason": "because"})
