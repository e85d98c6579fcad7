"""vLLM's own settings beside those that all engines have."""

import pytest

from snapd.engines.support import read_settings
from snapd.engines.vllm.settings import SOURCE, VllmSettings
from snapd.errors import ConfigError


def test_settings_of_all_engines_and_of_vllm_are_read_from_one_place() -> None:
    settings = read_settings({"socket_path": "/x.sock", "hold_s": 3}, SOURCE, VllmSettings)
    assert isinstance(settings, VllmSettings)
    assert (settings.socket_path, settings.hold_s, settings.verify) == ("/x.sock", 3.0, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hold_secs": 3}, "did you mean 'hold_s'"),
        ({"answer_wait_s": 2}, "answer_wait_s"),
        ({"held_requests_max": 0}, "held_requests_max"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
    ],
)
def test_what_is_wrong_is_told_by_name(given: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"{SOURCE}: .*{told}"):
        read_settings(given, SOURCE, VllmSettings)
