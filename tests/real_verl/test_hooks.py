"""Every hook by which a verl job loads the patches without an edit, each alone, in a real Ray actor on the CPU.

``make test`` runs `GATE_HOOKS`, the one that comes last, on one verl; the cells of ``compat_matrix/cells.toml`` run all
hooks that their release of verl has.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from verl_environment import HERE, VerlEnv

AUTOLOAD = "fsdp_sink_patches.autoload"
RUNTIME_ENV = "+ray_kwargs.ray_init.runtime_env"


@dataclass(frozen=True)
class Hook:
    """``since``: the first supported verl that has it. ``early``: before verl binds names of its own functions."""

    since: str = "0.5.0"
    loads: bool = True
    early: bool = True
    shell: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()


HOOKS = {
    "plugin": Hook(since="0.9.0", shell={"VERL_USE_EXTERNAL_PLUGINS": "auto"}),
    "external modules": Hook(since="0.6.1", shell={"VERL_USE_EXTERNAL_MODULES": AUTOLOAD}),
    "external modules, every node": Hook(
        since="0.6.1", overrides=(f"{RUNTIME_ENV}.env_vars.VERL_USE_EXTERNAL_MODULES={AUTOLOAD}",)
    ),
    "worker set-up": Hook(since="0.6.1", overrides=(f"{RUNTIME_ENV}.worker_process_setup_hook={AUTOLOAD}.load",)),
    "external_lib": Hook(early=False, overrides=(f"actor_rollout_ref.model.external_lib={AUTOLOAD}",)),
    "none": Hook(loads=False, early=False),
    "run": Hook(launcher=("-m", "fsdp_sink_patches.run")),
}
GATE_HOOKS = ("external_lib",)


def _verl_here() -> Version | None:
    try:
        return Version(metadata.version("verl"))
    except metadata.PackageNotFoundError:
        return None


def _hooks() -> list[str]:
    here = _verl_here()
    if here is None:
        return list(GATE_HOOKS)
    return [name for name, hook in HOOKS.items() if here >= Version(hook.since)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, verl_env: VerlEnv) -> Path:
    folder = tmp_path_factory.mktemp("model")
    program = "import sys, sft_job, pathlib; sft_job.write(pathlib.Path(sys.argv[1]))"
    done = verl_env.start("-c", program, folder, cwd=folder, PYTHONPATH=str(HERE))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "model"


def ask(env: VerlEnv, model: Path, hook: Hook) -> Any:
    """What a worker of verl's found; verl discovers plugins only where the hook's shell says so."""
    modules = hook.shell.get("VERL_USE_EXTERNAL_MODULES", "")
    overrides = list(hook.overrides)
    shell = {"PYTHONPATH": str(HERE), "VERL_USE_EXTERNAL_PLUGINS": "none", **hook.shell}
    if env.version >= Version("0.9"):
        shell |= {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, ["cpu_platform", modules])),
        }
        # The variable of the runtime_env takes the place of the shell's, which brought the CPU.
        overrides = [o.replace(f"MODULES={AUTOLOAD}", f"MODULES='cpu_platform,{AUTOLOAD}'") for o in overrides]
    if env.version >= Version("0.6"):
        overrides += ["ray_kwargs.ray_init.num_cpus=2", "+ray_kwargs.ray_init.include_dashboard=False"]
    else:
        overrides += ["ray_init.num_cpus=2"]
    # Short, because Ray's sockets lie in it; and no other session's cluster is found there.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as ray:
        return env.measure(
            *hook.launcher, "-m", "ray_job", model, *overrides, cwd=model.parent, RAY_TMPDIR=ray, **shell
        )


@pytest.mark.parametrize("name", _hooks())
def test_a_worker_is_patched_by_the_hook_alone(name: str, verl_env: VerlEnv, model: Path) -> None:
    found = ask(verl_env, model, HOOKS[name])
    assert (found["loaded"], found["early"]) == (HOOKS[name].loads, HOOKS[name].early)
    if not HOOKS[name].loads:
        assert found["packed"] > 1e-1, "upstream isolates packed documents by itself now"
        return
    assert found["packed"] < 1e-5
    # What verl bound before is ours too, or it would go on calling upstream's.
    assert found["stale"] == []
    assert found["bound"]
    assert all(found["bound"].values())
