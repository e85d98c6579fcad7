"""A real ``sglang.Engine`` on the CPU, told what to do by lines of JSON: ``python engine_child.py CONFIG``.

Answers go to the file descriptor that was standard output; what SGLang prints goes to standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from tools.engines.torchvision_ops import declare_torchvision_ops

# SGLang's own children import this module again, and need them too.
declare_torchvision_ops()

FLUSH_S = 60.0
# A file: while it is there, a push stops when it has begun, and says so in a file beside it. One beside it
# does the same with a load that was accepted, before its first layer is moved.
HOLD = "SNAPD_TEST_HOLD"
# Set: Mooncake's ports are kept to this host.
INSIDE = "SNAPD_TEST_INSIDE"
# As its environment says.
MOONCAKE_PORTS = range(15_000, 17_001)


def hold_pushes(hold: Path) -> None:
    """Have SGLang's scheduler hold pushes of the linker in their middle."""
    from snapd.engines.sglang_offload import Offloader

    finish = Offloader._finish

    def held(self: Offloader, job: Any) -> Any:
        # One plane.
        if hold.exists() and not job.step(1):
            hold.with_suffix(".held").touch()
            while hold.exists():
                time.sleep(0.01)
        return finish(self, job)

    Offloader._finish = held  # type: ignore[method-assign]


def hold_loads(hold: Path) -> None:
    """Have SGLang's scheduler hold loads of the linker between their two passes."""
    from snapd.engines.sglang_layers import LayerLoads

    land = LayerLoads._land

    def held(self: LayerLoads, batch: Any) -> None:
        if hold.exists():
            hold.with_suffix(".loading").touch()
            while hold.exists():
                time.sleep(0.01)
        land(self, batch)

    LayerLoads._land = held  # type: ignore[method-assign]


def keep_inside() -> None:
    """Have SGLang's transfer engine, which listens on every address, be reached from this host only."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    from snapd.transport.loopback import listening_inside_only

    initialize = MooncakeTransferEngine.initialize

    def inside(self: Any, *args: Any, **kwargs: Any) -> None:
        with listening_inside_only(MOONCAKE_PORTS):
            initialize(self, *args, **kwargs)

    MooncakeTransferEngine.initialize = inside


def serve(config: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**config)
    try:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(answer(engine, request)), file=answers, flush=True)
    finally:
        engine.shutdown()


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "flush":
        return {"flushed": flush(engine)}
    try:
        output = engine.generate(
            input_ids=request["token_ids"],
            sampling_params={"max_new_tokens": request["max_tokens"], "temperature": 0, "ignore_eos": True},
            **request.get("bootstrap", {}),
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    outputs = output if isinstance(output, list) else [output]
    answers = [{"token_ids": one["output_ids"], "meta": one["meta_info"]} for one in outputs]
    return {"answers": answers} if isinstance(output, list) else answers[0]


def flush(engine: Any) -> bool:
    """Empty the engine's cache; it is refused until the last request's end has gone round."""
    until_s = time.monotonic() + FLUSH_S
    while time.monotonic() < until_s:
        if engine.flush_cache().success:
            return True
        time.sleep(0.05)
    return False


if __name__ == "__mp_main__" and HOLD in os.environ:
    hold_pushes(Path(os.environ[HOLD]))
    hold_loads(Path(os.environ[HOLD]).with_suffix(".loads"))
if __name__ == "__mp_main__" and INSIDE in os.environ:
    keep_inside()
if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
