"""GPU tests: ``python -m pytest tests/gpu`` on a machine with a CUDA card; elsewhere nothing here is collected."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
