"""Rank 1 of a job loses a setting: ``VERL_USE_EXTERNAL_MODULES=odd_rank`` is imported before verl's plugins."""

from __future__ import annotations

import os

if os.environ.get("RANK") == "1":
    os.environ["FSDP_SINK_PATCHES_DISABLE"] = "transformers.packed-masks"
