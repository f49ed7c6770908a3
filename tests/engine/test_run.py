"""run, its children, and autoload: in real processes, against a planted patch of a module of the standard library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_sink_patches

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent

PATCH = """
from fsdp_sink_patches import Patch, Target
def replacement(original, *args, **kwargs):
    return original(*args, **kwargs) + 1000
PATCH = Patch(
    id="planted.thing", gives="one thing", distribution="planted", requires=">=1", fixed_in=None, link="https://x/1",
    remove_when="never", targets=(Target("planted:f", replacement),),
)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare checkout whose only patch is the planted one, and an upstream beside it."""
    from fsdp_sink_patches._fingerprint import digest

    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "fsdp_sink_patches", root / "fsdp_sink_patches", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", root)
    for folder in ("patches", "patches/planted", "compat_matrix"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").touch()
    shutil.copy(ROOT / "patches" / "__init__.py", root / "patches")
    (root / "patches" / "planted" / "thing.py").write_text(PATCH)
    upstream = root / "upstream"
    (upstream / "planted-1.0.dist-info").mkdir(parents=True)
    (upstream / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (upstream / "planted.py").write_text("def f(x):\n    return x\n")
    value = digest("planted:f", upstream)
    (root / "compat_matrix" / "planted.toml").write_text(
        f'[["planted.thing"]]\nversions = ["1.0"]\ndigests = {{ "planted:f" = "{value}" }}\n'
    )
    return root


def python(
    checkout: Path, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_SINK", "PYTHONPATH"))}
    paths = [environment.pop("PYTHONPATH", ""), str(checkout), str(checkout / "upstream")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or checkout,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def script(tmp_path: Path, text: str, name: str = "program.py") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_run_a_script_as_main_with_its_own_argv(checkout: Path, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import sys, planted, neighbour\n"
        "if __name__ == '__main__':\n    print(planted.f(1), sys.argv, neighbour.X, __file__)\n    sys.exit(7)\n",
    )
    script(tmp_path, "X = 5\n", "neighbour.py")
    done = python(checkout, "-m", "fsdp_sink_patches.run", program, "--a", "-m", "b")
    assert done.stdout.split("\n")[0] == f"1001 {[program, '--a', '-m', 'b']} 5 {program}", done.stderr
    assert done.returncode == 7


def test_run_under_a_launcher_compares_ranks_too(checkout: Path, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import os, torch, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1':\n    import planted, fsdp_sink_patches\n    fsdp_sink_patches.unapply()\n"
        "dist.init_process_group('gloo')\n"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0).step()\n",
    )
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = python(checkout, *torchrun, "-m", "fsdp_sink_patches.run", program, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert "the patches of rank 1 are not those of rank 0" in done.stderr


def test_run_a_module(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path, "import sys, planted\nprint(planted.f(1), sys.argv[1:], __name__)\n", "mod.py")
    done = python(checkout, "-m", "fsdp_sink_patches.run", "-m", "mod", "x", PYTHONPATH=str(tmp_path))
    assert done.stdout == "1001 ['x'] __main__\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--nope"], ["no_such_file.py"]])
def test_usage_errors(checkout: Path, arguments: list[str]) -> None:
    done = python(checkout, "-m", "fsdp_sink_patches.run", *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


CHILD = "import planted; print('child', planted.f(1), flush=True)"


def test_subprocesses_apply_too(checkout: Path, tmp_path: Path) -> None:
    program = script(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}], cwd='/')\n")
    done = python(checkout, "-m", "fsdp_sink_patches.run", program)
    assert done.stdout == "child 1001\n", done.stderr
    plain = python(checkout, program)
    assert plain.stdout == "child 1\n", "the control: without run, a child is not patched"


def test_children_of_a_bare_checkout_find_the_package(checkout: Path, tmp_path: Path) -> None:
    """The package is importable in the parent only because of its working directory."""
    program = script(
        tmp_path,
        "import os, subprocess, sys\n"
        f"os.environ['PYTHONPATH'] += os.pathsep + {str(checkout / 'upstream')!r}\n"
        f"subprocess.run([sys.executable, '-c', {CHILD!r}], cwd='/')\n",
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_SINK", "PYTHONPATH"))}
    command = [sys.executable, "-m", "fsdp_sink_patches.run", program]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "child 1001\n", done.stderr


def test_a_checkout_does_not_hide_the_users_own_packages(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("OWNER = 'the user'\n")
    child = "import patches, planted; print(patches.OWNER, planted.f(1))"
    program = script(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], cwd='/')\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_SINK", "PYTHONPATH"))}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(checkout / "upstream")])
    command = [sys.executable, "-m", "fsdp_sink_patches.run", program]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "the user 1001\n", done.stderr


@pytest.mark.parametrize(("strict", "code", "printed"), [("0", 0, "trains\n"), ("1", 1, "")])
def test_a_child_that_cannot_be_patched_ends_only_if_strict(
    checkout: Path, tmp_path: Path, strict: str, code: int, printed: str
) -> None:
    children = str(checkout / "fsdp_sink_patches" / "_children")
    done = python(
        checkout, "-c", "print('trains')",
        PYTHONPATH=children, FSDP_SINK_PATCHES="planted.thin", FSDP_SINK_PATCHES_STRICT=strict,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, printed)
    assert "did you mean 'planted.thing'" in done.stderr
    assert ("this process ends here" in done.stderr) == bool(code)


def test_spawned_children_apply_too(checkout: Path, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import multiprocessing as mp\n"
        "def work(q):\n    import planted\n    q.put(planted.f(1))\n"
        "if __name__ == '__main__':\n"
        "    c = mp.get_context('spawn'); q = c.SimpleQueue(); p = c.Process(target=work, args=(q,))\n"
        "    p.start(); p.join(); print(p.exitcode, q.get())\n",
    )
    done = python(checkout, "-m", "fsdp_sink_patches.run", program)
    assert done.stdout == "0 1001\n", done.stderr


def test_torchrun_workers_apply_too(checkout: Path, tmp_path: Path) -> None:
    # One write a line: the ranks share the pipe, and print writes the pieces of a line one by one when unbuffered.
    program = script(
        tmp_path, "import os, planted\nos.write(1, f'rank {os.environ[\"RANK\"]} {planted.f(1)}\\n'.encode())\n"
    )
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program]
    done = python(checkout, "-m", "fsdp_sink_patches.run", *arguments, OMP_NUM_THREADS="1")
    assert sorted(line for line in done.stdout.split("\n") if line.startswith("rank")) == ["rank 0 1001", "rank 1 1001"]


def test_the_users_own_sitecustomize_still_runs(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path, "import os\nos.environ['THEIRS'] = __file__\n", "sitecustomize.py")
    child = "import os, sys, planted; print(planted.f(1), os.environ['THEIRS'], sys.modules['sitecustomize'].__file__)"
    program = script(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n")
    done = python(checkout, "-m", "fsdp_sink_patches.run", program, PYTHONPATH=str(tmp_path))
    theirs = str(tmp_path / "sitecustomize.py")
    assert done.stdout.split("\n")[0].split() == ["1001", theirs, theirs], done.stderr


def test_children_are_untouched_when_none_is_chosen(checkout: Path, tmp_path: Path) -> None:
    child = "import sys; print('fsdp_sink_patches' in sys.modules)"
    program = script(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n")
    done = python(checkout, "-m", "fsdp_sink_patches.run", program, FSDP_SINK_PATCHES="none")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("strict", "code", "printed"), [("", 0, "started\n"), ("1", 1, "")])
def test_a_broken_package_keeps_an_interpreter_from_starting_only_if_strict(
    checkout: Path, tmp_path: Path, strict: str, code: int, printed: str
) -> None:
    children = checkout / "fsdp_sink_patches" / "_children"
    broken = tmp_path / "fsdp_sink_patches"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('broken install')\n")
    path = os.pathsep.join([str(children), str(tmp_path)])
    done = python(checkout, "-c", "print('started')", PYTHONPATH=path, cwd=tmp_path, FSDP_SINK_PATCHES_STRICT=strict)
    assert (done.returncode, done.stdout) == (code, printed)
    assert "broken install" in done.stderr


# --- autoload ------------------------------------------------------------------------------------------------------


def test_autoload_applies(checkout: Path) -> None:
    done = python(checkout, "-c", "import fsdp_sink_patches.autoload, planted; print(planted.f(1))")
    assert (done.stdout, done.stderr) == ("1001\n", "")


LOGGED = "import logging; logging.basicConfig(format='%(levelname)s %(message)s')\nimport planted\nplanted.f = print\n"


@pytest.mark.parametrize(("strict", "code"), [("0", 0), ("1", 1)])
def test_autoload_logs_failures_at_error_and_raises_only_if_strict(checkout: Path, strict: str, code: int) -> None:
    program = LOGGED + "import fsdp_sink_patches.autoload\nprint('went on')\n"
    done = python(checkout, "-c", program, FSDP_SINK_PATCHES_STRICT=strict)
    assert "ERROR fsdp_sink_patches.autoload: planted.thing: conflict" in done.stderr
    assert done.returncode == code
    assert done.stdout == ("" if code else "went on\n")


def test_autoload_does_not_raise_for_an_unknown_id(checkout: Path) -> None:
    program = LOGGED + "import fsdp_sink_patches.autoload\nprint('went on')\n"
    done = python(checkout, "-c", program, FSDP_SINK_PATCHES="planted.thin")
    assert "did you mean 'planted.thing'" in done.stderr
    assert done.stdout == "went on\n"


PLUGIN = (
    "try:\n    import fsdp_sink_patches._verl_plugin\nexcept Exception:\n    pass  # as verl does\nprint('went on')\n"
)


@pytest.mark.parametrize(("strict", "code", "printed"), [("0", 0, "went on\n"), ("1", 1, "")])
def test_what_verl_swallows_ends_the_process_if_strict(checkout: Path, strict: str, code: int, printed: str) -> None:
    done = python(checkout, "-c", PLUGIN, FSDP_SINK_PATCHES="planted.thin", FSDP_SINK_PATCHES_STRICT=strict)
    assert (done.returncode, done.stdout) == (code, printed)
    assert "did you mean 'planted.thing'" in done.stderr


@pytest.mark.parametrize(("strict", "code", "printed"), [("", 0, "went on\n"), ("1", 1, "")])
def test_a_broken_package_ends_verl_only_if_strict(
    checkout: Path, tmp_path: Path, strict: str, code: int, printed: str
) -> None:
    """The rest of the package can't be imported, because a dependency is too old, say."""
    broken = tmp_path / "fsdp_sink_patches"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "autoload.py").write_text("raise RuntimeError('broken install')\n")
    shutil.copy(checkout / "fsdp_sink_patches" / "_verl_plugin.py", broken)
    done = python(checkout, "-c", PLUGIN, PYTHONPATH=str(tmp_path), cwd=tmp_path, FSDP_SINK_PATCHES_STRICT=strict)
    assert (done.returncode, done.stdout) == (code, printed)
    assert "broken install" in done.stderr
