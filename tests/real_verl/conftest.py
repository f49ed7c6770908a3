"""``verl_env``: an environment with the real verl, once a session; `VerlEnv` says what can be asked of it."""

from __future__ import annotations

import pytest
from verl_environment import VerlEnv, make


@pytest.fixture(scope="session")
def verl_env(tmp_path_factory: pytest.TempPathFactory) -> VerlEnv:
    return make(tmp_path_factory.mktemp("verl_env"), tmp_path_factory.mktemp("source"))
