"""Lets SGLang be imported beside a torch that was built for the CPU.

torchvision's wheel on PyPI is built for CUDA. Beside torch's CPU build its operators do not load, and
importing it fails at the first that is missing. SGLang imports it, and the CPU needs none of them.
"""

import importlib.metadata

import torch
from torch import library

_NAMES = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_ops() -> None:
    """Declare the operators that torchvision's own Python code names. Call it before SGLang is imported."""
    if torch.version.cuda is not None or _is_cpu_build():
        return
    for name in _NAMES:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"torchvision::{name}", _SCHEMA)


def _is_cpu_build() -> bool:
    """Return whether torchvision brings operators of its own for the CPU, or is not there."""
    try:
        return importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True
