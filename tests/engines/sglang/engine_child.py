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
# A file: while it is there, a push stops when it has begun, and says so in a file beside it.
HOLD = "SNAPD_TEST_HOLD"


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
    output = engine.generate(
        input_ids=request["token_ids"],
        sampling_params={"max_new_tokens": request["max_tokens"], "temperature": 0, "ignore_eos": True},
    )
    return {"token_ids": output["output_ids"], "meta": output["meta_info"]}


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
if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
