"""What the user gets, in one line.

What breaks for the user: what they do, what goes wrong, and that nothing says so.

With the patch: what happens instead, and what is left alone.

Copy this file to ``patches/<upstream>/<slug>.py``, where the id below is ``<upstream>.<slug>`` with dashes. Nothing may
run at import, and neither torch nor the upstream may be imported here: import them inside functions, or in a helper
module beside this one whose name starts with an underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


def function(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it does to the arguments or the result; shapes and dtypes."""
    return original(*args, **kwargs)


PATCH = Patch(
    id="upstream.what-it-gives",
    gives="what it gives, five words",
    distribution="upstream",
    requires=">=1.0",
    fixed_in=None,
    link="https://github.com/upstream/upstream/issues/1",
    remove_when="upstream does this and that by itself",
    targets=(Target("upstream.module:function", function),),
    relies_on=("upstream.module:what_it_calls", "upstream.module:only_in_some_releases?"),
)


def validate(device: str) -> Measurement:
    """The upstream's own entry point against fp64, measured the same way whether the patch is applied or not."""
    import importlib
    import time

    import torch

    upstream = importlib.import_module("upstream.module")
    x = torch.randn(1024, dtype=torch.float64, device=device)
    start = time.perf_counter()
    out = upstream.function(x.float())
    time_ms = (time.perf_counter() - start) * 1e3
    error = float((out.double() - x).norm() / x.norm())
    return Measurement(errors={"out": error}, limits={"out": 1e-5}, time_ms=time_ms, peak_bytes=0)
