"""``verl_env``: an environment with the real verl, once a session; `VerlEnv` says what can be asked of it."""

from __future__ import annotations

import pytest
from job import Job, prepare
from verl_environment import VerlEnv, extend, make

# verl 0.9.1 says transformers<5.11, and its trainer needs that.
TRANSFORMERS = "transformers==5.10.2"


@pytest.fixture(scope="session")
def verl_env(tmp_path_factory: pytest.TempPathFactory) -> VerlEnv:
    return make(tmp_path_factory.mktemp("verl_env"), tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def job(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Job:
    env = extend(verl_env, tmp_path_factory.mktemp("trainer_env"), TRANSFORMERS)
    return prepare(env, tmp_path_factory.mktemp("job"))
