"""Reasons are closed and explained; errors say who erred."""

import inspect

import pytest

from snapd import errors
from snapd.errors import (
    ERROR_BY_REASON,
    REASON_HELP,
    BufferFull,
    ConfigError,
    ConnectionLost,
    ConnectionProblem,
    DaemonUnreachable,
    LimitReached,
    Reason,
    RequestError,
    RequestTimeout,
    SnapdError,
    StaleHandle,
    error_for,
)

ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
]


def test_the_reasons_that_callers_already_use_stay_spelled_as_they_are():
    assert Reason.ALLOC_FAILED == "alloc-failed"
    assert Reason.SESSION_NOT_RESIDENT == "session-not-resident"
    assert Reason.SNAPSHOT_BUF_FULL == "snapshot-buf-full"
    assert Reason.ALLOC_FAILED_ON_FINALIZE == "alloc-failed-on-finalize"


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_spelled_after_its_name_and_explained(reason):
    assert reason.value == reason.name.lower().replace("_", "-")
    assert REASON_HELP[reason].endswith(".")


def test_everything_raised_on_purpose_has_one_base():
    assert len(ERRORS) > 15
    assert all(issubclass(cls, SnapdError) for cls in ERRORS)


def test_every_request_error_has_a_reason_of_its_own():
    subclasses = {cls for cls in ERRORS if issubclass(cls, RequestError)} - {RequestError}
    assert set(ERROR_BY_REASON.values()) == subclasses
    assert all("code" in vars(cls) for cls in subclasses)
    assert all(cls.code is reason for reason, cls in ERROR_BY_REASON.items())


@pytest.mark.parametrize("reason", Reason)
def test_an_error_for_a_reason_carries_it_and_is_of_its_class(reason):
    error = error_for(reason, "what happened", 250)
    assert type(error) is ERROR_BY_REASON.get(reason, RequestError)
    assert (error.reason, error.retry_after_ms) == (reason, 250)
    assert str(error) == f"{reason.value}: what happened"


def test_an_error_without_a_message_says_what_the_reason_means():
    assert str(StaleHandle()) == f"stale-handle: {REASON_HELP[Reason.STALE_HANDLE]}"
    assert StaleHandle().retry_after_ms == 0


def test_only_what_may_succeed_later_is_retryable():
    assert {cls for cls in ERROR_BY_REASON.values() if cls.retryable} == {BufferFull, LimitReached}


def test_a_lost_answer_is_no_refusal():
    for cls in (DaemonUnreachable, ConnectionLost, RequestTimeout):
        assert issubclass(cls, ConnectionProblem)
        assert not issubclass(cls, RequestError)
    assert not issubclass(ConfigError, RequestError)
