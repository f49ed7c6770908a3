"""What every test process starts with: no network, no ambient choice of patches, no fight for cores."""

from __future__ import annotations

import os

for _name in [name for name in os.environ if name.startswith("FSDP_SINK_PATCHES")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
