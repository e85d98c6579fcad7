"""What vLLM sees of the connector. Needs vLLM, so most of it is skipped where there is none."""

import inspect
import pickle
import subprocess
import sys

import pytest

from snapd.engines.vllm.orders import LoadOrder, Orders, PushOrder
from snapd.layout import Layout


def test_the_package_is_imported_without_vllm() -> None:
    code = (
        "import sys, snapd.engines.vllm, snapd.engines.vllm.scheduling, snapd.engines.vllm.working; "
        "assert not any(name.split('.')[0] == 'vllm' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_connector_is_to_be_had() -> None:
    import snapd.engines.vllm

    with pytest.raises(AttributeError, match="SnapdConector"):
        snapd.engines.vllm.SnapdConector  # noqa: B018


def test_orders_can_be_sent_to_another_process() -> None:
    load = LoadOrder(
        request_id="r", session_id="s", slab_handle=1, layout_fingerprint="f", token_ids=[1, 2],
        resident_tokens=0, wanted_tokens=2, block_ids=[3],
    )  # fmt: skip
    push = PushOrder(request_id="r", socket_path="/x", grant=None, block_ids=[1])
    orders = Orders(loads=[load], pushes=[push], layouts=[Layout(k_stride_bytes=(8,))])
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert Orders().is_empty and not orders.is_empty


def test_vllm_finds_the_connector_and_it_is_whole() -> None:
    pytest.importorskip("vllm.config", reason="vLLM is not installed: see tools/setup_engine.sh")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector="SnapdConnector", kv_connector_module_path="snapd.engines.vllm", kv_role="kv_both"
    )
    connector = KVConnectorFactory.get_connector_class(config)
    assert not inspect.isabstract(connector)
    assert not KVConnectorFactory.supports_hma_config(config), "the hybrid allocator stays off"


def test_the_scheduler_is_told_who_came_and_whose_moves_have_ended() -> None:
    pytest.importorskip("vllm.config", reason="vLLM is not installed: see tools/setup_engine.sh")
    from types import SimpleNamespace
    from unittest.mock import Mock, call

    from vllm.v1.outputs import KVConnectorOutput

    from snapd.engines.vllm import SnapdConnector

    connector = object.__new__(SnapdConnector)
    connector._scheduler = side = Mock(has_layout=True)
    connector.on_new_request(SimpleNamespace(request_id="r1"))
    connector.update_connector_output(KVConnectorOutput(finished_sending={"r2"}, finished_recving={"r3"}))
    connector.update_connector_output(KVConnectorOutput())
    assert side.arrived.mock_calls == [call("r1")]
    assert side.sent.mock_calls == [call({"r2"}), call(())]
    assert side.loaded.mock_calls == [call({"r3"}), call(())]


def test_statistics_add_up_and_become_metrics() -> None:
    pytest.importorskip("vllm.config", reason="vLLM is not installed: see tools/setup_engine.sh")
    from types import SimpleNamespace

    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from snapd.engines.vllm import SnapdConnector
    from snapd.engines.vllm.metrics import SnapdStats

    stats = SnapdStats(data={"pushes": {"ok": 1.0}}).aggregate(
        SnapdStats(data={"pushes": {"ok": 2.0, "snapshot-buf-full": 1.0}, "pushed_tokens": {"": 64.0}})
    )
    assert not stats.is_empty() and SnapdStats().is_empty()
    assert stats.reduce()["Pushes failed"] == 1
    rebuilt = SnapdConnector.build_kv_connector_stats(stats.to_dict())
    assert rebuilt is not None and rebuilt.data == stats.data
    metrics = SnapdConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["tiny", "0"]},
    )
    metrics.observe(stats.data, 0)
    metrics.observe(stats.data, 0)
    labels = {"model_name": "tiny", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:snapd_pushes_total", labels | {"reason": "ok"}) == 6
    assert REGISTRY.get_sample_value("vllm:snapd_pushed_tokens_total", labels) == 128
