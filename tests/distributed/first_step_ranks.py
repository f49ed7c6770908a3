"""Two ranks that load the patches by `fsdp_sink_patches.autoload` and step an optimizer: what came of it, as JSON.

    python first_step_ranks.py FOLDER    # FOLDER holds an upstream called planted

Ranks are forked, so that torch is imported once for all cases.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it
import torch.distributed as dist

UNPATCHED = {"FSDP_SINK_PATCHES_DISABLE": "planted.one"}
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    # case: environment of every rank, and of rank 1 besides
    "alike": ({}, {}),
    "differ": ({}, UNPATCHED),
    "differ, warn": ({"FSDP_SINK_PATCHES_RANKS": "warn"}, UNPATCHED),
    "differ, off": ({"FSDP_SINK_PATCHES_RANKS": "off"}, UNPATCHED),
    "settings": ({}, {"FSDP_SINK_PATCHES_ROPE_DTYPE": "activation"}),
    "silent": ({}, {"FSDP_SINK_PATCHES": "none"}),
    "silent, strict": ({"FSDP_SINK_PATCHES_STRICT": "1"}, {"FSDP_SINK_PATCHES": "none"}),
    "not imported": ({}, {"NOT_IMPORTED": "1"}),
    "shadowed": ({"SHADOWED": "1"}, {}),
    "shadowed, strict": ({"SHADOWED": "1", "FSDP_SINK_PATCHES_STRICT": "1"}, {}),
    "unreadable": ({"FSDP_SINK_PATCHES_RANKS": "perhaps"}, UNPATCHED),
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(f"{record.levelname} {record.getMessage()}")


def rank(case: str, number: int, folder: str, answers: Any) -> None:
    everyone, one = CASES[case]
    os.environ.update(everyone | (one if number == 1 else {}))
    kept = Kept()
    logging.getLogger("fsdp_sink_patches").addHandler(kept)
    from fsdp_sink_patches import Patch, Target, _fingerprint, _registry

    patch = Patch("planted.one", "one", "planted", ">=1", None, "l", "r", (Target("planted:f", _replacement),))
    _registry.patches = lambda: {"planted.one": patch}
    _fingerprint.match = lambda patch: _fingerprint.Match(True, {"planted:f": "0"}, None, ())
    import fsdp_sink_patches.autoload
    import fsdp_sink_patches.distributed

    fsdp_sink_patches.distributed.WAIT_SECONDS = 1.0 if "silent" in case else 60.0
    if "NOT_IMPORTED" not in os.environ:
        import planted

        if "SHADOWED" in os.environ:
            planted.f = print
    dist.init_process_group("gloo", init_method=f"file://{folder}/{case}", rank=number, world_size=2)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    outcome, begin = "trained", time.monotonic()
    for _ in range(2):
        weight.grad = torch.ones(2)
        try:
            optimizer.step()
        except Exception as error:
            outcome = f"{type(error).__name__} {error}"
            break
    found = {"outcome": outcome, "weight": weight.tolist(), "seconds": time.monotonic() - begin, "logged": kept.lines}
    answers.put((number, found))
    dist.barrier()
    dist.destroy_process_group()


def _replacement(original: Any, *a: Any) -> Any:
    return original(*a)


def main(folder: str) -> None:
    sys.path.append(folder)
    fork = multiprocessing.get_context("fork")
    found = {}
    for case in CASES:
        answers = fork.SimpleQueue()
        ranks = [fork.Process(target=rank, args=(case, number, folder, answers)) for number in (0, 1)]
        for process in ranks:
            process.start()
        found[case] = [answer for _, answer in sorted(answers.get() for _ in ranks)]
        for process in ranks:
            process.join(60)
    print(json.dumps(found))


if __name__ == "__main__":
    assert Path(sys.argv[1], "planted.py").is_file()
    main(sys.argv[1])
