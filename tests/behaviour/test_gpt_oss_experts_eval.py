"""gpt-oss's experts in eval mode, on the transformers that has two branches, against upstream in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
ID = "transformers.gpt-oss-experts-eval"
OLD = ("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.1")
NEEDED = ("requests", "urllib3", "charset_normalizer", "certifi")
PROGRAM = """
import json, sys
import fsdp_sink_patches
from fsdp_sink_patches import _registry
if sys.argv[1:]:
    fsdp_sink_patches.apply(*sys.argv[1:])
found = _registry.module("transformers.gpt-oss-experts-eval").validate("cpu")

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from fsdp_sink_patches.patches.transformers._experts_validation import OnAGpu
from transformers import GptOssConfig

experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=4)).eval()
products = []
bmm = torch.bmm
torch.bmm = lambda *a, **k: products.append(1) or bmm(*a, **k)
for tokens in (4, 5):  # as many as experts, and one more
    OnAGpu.asked = False
    indices = torch.zeros(tokens, 1, dtype=torch.long)
    weights = torch.zeros(tokens, 4).scatter_(1, indices, 1.0)
    experts(torch.randn(1, tokens, 8).as_subclass(OnAGpu), router_indices=indices, routing_weights=weights)
print(json.dumps([found.right, dict(found.errors), len(products), experts.training]))
"""


@pytest.fixture(scope="module")
def run(transformers_version: Version, tmp_path_factory: pytest.TempPathFactory) -> Any:
    paths = [str(ROOT)]
    if transformers_version >= Version("5"):
        site = tmp_path_factory.mktemp("transformers4")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(site), *OLD, *NEEDED], check=True)
        paths.insert(0, str(site))

    def measure(*ids: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        environment |= {"FSDP_SINK_PATCHES": "none", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", PROGRAM, *ids]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return measure


def test_each_expert_computes_its_own_tokens(run: Any) -> None:
    right, errors, products, training = run(ID)
    assert right
    assert errors["out"] < 1e-6
    assert errors["largest tensor"] <= 1
    assert products == 2  # four tokens, no more than experts, keep upstream's one product of two matrices
    assert training is False


def test_upstream_repeats_all_tokens_over_all_experts(run: Any) -> None:
    right, errors, products, _ = run()
    assert not right
    assert errors["out"] < 1e-6
    assert errors["largest tensor"] > 4
    assert products == 4
