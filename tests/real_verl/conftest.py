"""``verl_env``: an environment with the real verl, once a session; `VerlEnv` says what can be asked of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from job import Job, prepare
from verl_environment import VerlEnv, extend, make

# verl 0.9.1 says transformers<5.11, and its trainer needs that.
TRANSFORMERS = "transformers==5.10.2"


@pytest.fixture(scope="session")
def verl_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlEnv]:
    folder = tmp_path_factory.mktemp("verl_env")
    yield make(folder, tmp_path_factory.mktemp("source"))
    shutil.rmtree(folder)  # 400 MB, and pytest keeps the folders of three sessions


@pytest.fixture(scope="session")
def job(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("trainer_env")
    yield prepare(extend(verl_env, folder, TRANSFORMERS), tmp_path_factory.mktemp("job"))
    shutil.rmtree(folder)
