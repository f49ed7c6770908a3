"""The report: rows, states, exit codes, text and JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from planted_checkout import CUDA_TORCH, PATCH, ROOT, SCHEMAS, UPSTREAM, Checkout, schema

EDITED = UPSTREAM.replace("def helper(x):\n    return x", "def helper(x):\n    return -x")
MODES = [pytest.param((), id="applied"), pytest.param(("--static",), id="static")]


@pytest.mark.parametrize("file", sorted(SCHEMAS.glob("*.json")), ids=lambda path: path.name)
def test_schemas_are_schemas(file: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(file.read_text(encoding="utf-8")))


def test_cells_follow_their_schema() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    cells = tomllib.loads((ROOT / "compat_matrix" / "cells.toml").read_text(encoding="utf-8"))
    jsonschema.validate(cells, schema("cells"))
    wrong = {"cells": {"x": {"python": "3.11", "distributions": ["torch>=2", "transformers==5.0"], "gpu": False}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema("cells"))


def test_the_patch_is_really_applied(checkout: Checkout) -> None:
    report = checkout.report()
    jsonschema.validate(report, schema("check"))
    (row,) = report["patches"]
    assert (row["state"], row["fingerprint"], row["version"], row["fails"]) == ("applied", "known", "1.5", False)
    assert row["gpu_record"]["state"] == "never"
    assert row["targets"][0]["file"] == str(checkout.upstream / "planted.py")
    assert row["targets"][0]["line"] == 1
    assert report["upstreams"]["planted"] == "1.5"


def test_torch_that_does_not_import_is_one_line(checkout: Checkout) -> None:
    assert "libplanted.so: cannot open" in checkout.report()["environment"]["torch_error"]
    done = checkout.check()
    assert "ImportError: libplanted.so: cannot open" in done.stdout.splitlines()[0]
    assert done.stderr == ""


def test_no_torch_at_all(checkout: Checkout) -> None:
    (checkout.upstream / "torch.py").unlink()
    hidden = "import importlib.util as u, sys; real = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
    hidden += "sys.modules['torch'] = None\nfrom fsdp_sink_patches import check; sys.exit(check.main(['--json']))"
    done = checkout.python("-c", hidden)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, schema("check"))
    assert report["environment"]["torch"] is None
    assert report["backends"] is None


def test_the_card_is_named(checkout: Checkout) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    line = checkout.check().stdout.splitlines()[0]
    assert "torch 2.11.0+cu130, CUDA 13.0, 1 x NVIDIA H200 (capability 9.0)" in line


def test_a_pipe_gets_plain_text(checkout: Checkout) -> None:
    done = checkout.check(COLUMNS="40", FORCE_COLOR="1")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("planted.thing"))
    assert re.split(r"  +", row) == ["planted.thing", "a thousand more", "planted 1.5", "known", "applied", "never"]


def test_a_terminal_gets_colour(checkout: Checkout) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fsdp_sink_patches.check", "--static"]
    env = checkout.environment() | {"TERM": "xterm-256color", "COLUMNS": "200"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(command, cwd=checkout.root, env=env, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert b"\x1b[" in text
    assert b"planted.thing" in text


@pytest.mark.parametrize("mode", MODES)
def test_unknown_source_is_drifted(checkout: Checkout, mode: tuple[str, ...]) -> None:
    checkout.install("1.6", EDITED)
    report = checkout.report(*mode, code=1)
    jsonschema.validate(report, schema("check"))
    (row,) = report["patches"]
    assert (row["state"], row["fingerprint"], row["fails"]) == ("drifted", "unknown", True)
    (drift,) = row["drift"]
    assert drift["ref"] == "planted:helper"
    assert drift["found"] != drift["expected"]
    assert (drift["found_in"], drift["expected_in"]) == ([], ["1.4", "1.5"])


def test_allowed_drift_is_applied_and_shown(checkout: Checkout) -> None:
    checkout.install("1.6", EDITED)
    row = checkout.row("--allow-drift", "planted.thing")
    assert (row["state"], row["fingerprint"]) == ("applied", "allowed")
    assert checkout.row("--static", "--allow-drift", "planted.thing")["state"] == "armed"
    assert checkout.row("--strict", "--allow-drift", "planted.thing", code=1)["fails"]


def test_explain(checkout: Checkout) -> None:
    checkout.install("1.6", EDITED)
    done = checkout.check("--explain", "planted.thing")
    assert done.returncode == 1
    row = checkout.row(code=1)
    for text in (
        "What breaks: planted.f is a thousand short.",
        "https://example.org/1",
        "planted.f adds it",
        f"{checkout.upstream / 'planted.py'}:1",
        "not in this release (it may lack it)",
        f"- expected {row['drift'][0]['expected']}  1.4 to 1.5, 2 releases",
        f"+ found    {row['drift'][0]['found']}  in no release we know",
        "matrix refresh planted==1.6",
        "--allow-drift planted.thing",
    ):
        assert text in done.stdout, text
    checkout.install("1.5", EDITED)
    assert "pip install --force-reinstall --no-deps planted==1.5" in checkout.check("--explain", "planted.thing").stdout


def test_explain_what_is_fine(checkout: Checkout) -> None:
    done = checkout.check("--explain", "planted.thing")
    assert done.returncode == 0
    assert "fingerprint  known, the source of 1.4 to 1.5, 2 releases" in done.stdout
    assert "differs from" not in done.stdout
    assert "expected" not in done.stdout


def test_versions_outside_the_range(checkout: Checkout) -> None:
    checkout.install("3.0")
    assert checkout.row()["state"] == "inapplicable"
    assert checkout.row("--strict", code=1)["state"] == "inapplicable"


def test_a_refused_release_says_why(checkout: Checkout) -> None:
    refuses = 'refuses={{"==1.6": "planted 1.6 is not causal"}}, link='
    checkout.write("patches/planted/thing.py", PATCH.replace("link=", refuses).format(slug="thing", name="f"))
    assert checkout.row()["state"] == "applied"
    checkout.install("1.6")
    report = checkout.report()
    jsonschema.validate(report, schema("check"))
    (row,) = report["patches"]
    assert row["state"] == "inapplicable"
    assert "planted 1.6 (planted 1.6 is not causal), expected planted>=1,<3, not ==1.6" in row["reason"]
    explained = " ".join(checkout.check("--explain", "planted.thing").stdout.split())
    assert "planted 1.6 is not causal" in explained
    assert "Install a release that satisfies >=1,<3, not ==1.6 to have it." in explained


def test_an_optional_target_in_a_package_that_the_release_lacks_is_no_fault(checkout: Checkout) -> None:
    targets = 'targets=(Target("planted.later.deep:f", replacement, optional=True), '
    checkout.write("patches/planted/thing.py", PATCH.replace("targets=(", targets).format(slug="thing", name="f"))
    known = checkout.root / "compat_matrix" / "planted.toml"
    known.write_text(known.read_text().replace("digests = {", 'digests = { "planted.later.deep:f" = "absent",'))
    row = checkout.row()
    assert (row["state"], row["reason"]) == ("applied", "")


def test_absent_is_fine_even_if_strict(checkout: Checkout) -> None:
    (checkout.upstream / "planted-1.dist-info" / "METADATA").unlink()
    (checkout.upstream / "planted-1.dist-info").rmdir()
    report = checkout.report("--strict")
    jsonschema.validate(report, schema("check"))
    assert report["patches"][0]["state"] == "absent"
    assert report["patches"][0]["gpu_record"] is None


def test_two_patches_of_one_function_are_a_conflict(checkout: Checkout) -> None:
    checkout.plant("twice")
    report = checkout.report(code=1)
    assert [row["state"] for row in report["patches"]] == ["applied", "conflict"]
    assert "not as it should be: planted.twice" in checkout.check().stdout


def test_a_replacement_that_raises_is_failed(checkout: Checkout) -> None:
    text = PATCH.replace("replacement),)", "lambda original: 1 // 0, kind='value'),)")
    checkout.plant("broken", "g", text)
    report = checkout.report(code=1)
    jsonschema.validate(report, schema("check"))
    row = report["patches"][0]
    assert (row["id"], row["state"]) == ("planted.broken", "failed")
    done = checkout.check("--explain", "planted.broken")
    assert "ZeroDivisionError" in done.stdout
    assert "Traceback" in done.stdout


@pytest.mark.parametrize("error", ["OSError: libplanted.so.2", "SystemExit: 0"])
def test_an_upstream_that_does_not_import_is_named(checkout: Checkout, error: str) -> None:
    name, _, text = error.partition(": ")
    checkout.install("1.5", UPSTREAM + f"print('on stdout')\nraise {name}('{text}')\n")
    row = checkout.row(code=1)
    assert (row["state"], row["fingerprint"], row["fails"]) == ("armed", "known", True)
    assert f"importing planted here raised {error}; to see where: python -c 'import planted'." in row["reason"]
    assert "repair planted or remove it" in row["reason"]
    done = checkout.check()
    assert done.returncode == 1
    assert "not as it should be: planted.thing" in done.stdout
    assert checkout.check("--explain", "planted.thing").returncode == 1
    assert checkout.row("--static")["state"] == "armed"  # nothing was imported, so nothing is known of it
    assert checkout.row(FSDP_SINK_PATCHES="none")["state"] == "disabled"
    checkout.install("1.5", EDITED + f"raise {name}('{text}')\n")
    assert checkout.row(code=1)["state"] == "drifted"


def test_a_module_that_does_not_import_and_is_not_needed_is_only_told(checkout: Checkout) -> None:
    """An optional target waits there; the others are in force, so the patch can be used."""
    checkout.write("upstream/planted_extra.py", "def f(x):\n    return x\nraise OSError('libextra.so')\n")
    text = PATCH.replace("replacement),)", 'replacement), Target("planted_extra:f", replacement, optional=True))')
    checkout.write("patches/planted/thing.py", text.format(slug="thing", name="f"))
    row = checkout.row("--allow-drift", "planted.thing")
    assert (row["state"], row["fails"]) == ("applied", False)
    assert "importing planted_extra here raised OSError: libextra.so" in row["reason"]
    assert "repair planted" not in row["reason"]


@pytest.mark.parametrize("mode", MODES)
def test_the_environment_is_obeyed(checkout: Checkout, mode: tuple[str, ...]) -> None:
    row = checkout.row(*mode, FSDP_SINK_PATCHES="none")
    assert (row["state"], row["reason"]) == ("disabled", "FSDP_SINK_PATCHES=none.")
    row = checkout.row(*mode, "--strict", FSDP_SINK_PATCHES_DISABLE="planted.thing")
    assert (row["state"], row["reason"]) == ("disabled", "named in FSDP_SINK_PATCHES_DISABLE.")
    checkout.install("1.6", EDITED)
    assert checkout.row(*mode, code=1, FSDP_SINK_PATCHES="planted.thing")["state"] == "drifted"
    assert checkout.row(*mode, FSDP_SINK_PATCHES="none")["state"] == "disabled"


@pytest.mark.parametrize("mode", MODES)
def test_the_environment_names_one_of_two(checkout: Checkout, mode: tuple[str, ...]) -> None:
    checkout.plant("other", "g")
    rows = checkout.report(*mode, FSDP_SINK_PATCHES="planted.other")["patches"]
    assert [row["state"] for row in rows] == ["armed" if mode else "applied", "disabled"]
    assert rows[1]["reason"] == "not named in FSDP_SINK_PATCHES."


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variable", ["FSDP_SINK_PATCHES", "FSDP_SINK_PATCHES_DISABLE"])
def test_an_unknown_id_in_the_environment_is_a_usage_error(
    checkout: Checkout, mode: tuple[str, ...], variable: str
) -> None:
    done = checkout.check(*mode, **{variable: "planted.think"})
    assert done.returncode == 2, done.stdout + done.stderr
    said = f"'planted.think' (in {variable}) is not a registered patch; did you mean 'planted.thing'?"
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [("--explain", "planted.think"), ("--gpu", "planted.think"), ("--allow-drift", "planted.think")],
    ids=lambda arguments: arguments[0],
)
def test_unknown_ids_are_usage_errors(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    done = checkout.check(*arguments)
    assert done.returncode == 2
    assert "'planted.think' (argument) is not a registered patch; did you mean 'planted.thing'?" in done.stderr
    assert done.stdout == ""


def test_other_usage_errors(checkout: Checkout) -> None:
    for arguments in (
        ("--record",),
        ("--cell", "x"),
        ("--record-dir", "x"),
        ("--gpu", "--device", "cpu", "--cell", "x"),
        ("--gpu", "--device", "cpu", "--record-dir", "x"),
        ("--gpu", "--device", "cpu", "--cell", ""),
    ):
        done = checkout.check(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert f"{'--record' if arguments[0] == '--record' else '--cell and --record-dir'} " in done.stderr
    assert checkout.check("--json", "--explain", "planted.thing").returncode == 2
    done = checkout.check(FSDP_SINK_PATCHES="planted.think")
    assert done.returncode == 2
    assert "did you mean 'planted.thing'?" in done.stderr


def test_static_imports_nothing(checkout: Checkout) -> None:
    code = "import sys; from fsdp_sink_patches import check; check.main(['--static'])\n"
    code += "assert not {'torch', 'planted', 'transformers', 'numpy'} & set(sys.modules)"
    done = checkout.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "armed (would apply)" in done.stdout


def test_static_on_the_real_patches_imports_nothing() -> None:
    code = "import sys; from fsdp_sink_patches import check; check.main(['--static', '--json'])\n"
    code += "assert not {'torch', 'transformers', 'numpy', 'flash_attn', 'triton'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, schema("check"))
    assert [row["id"] for row in report["patches"]] == sorted(row["id"] for row in report["patches"])


def test_the_real_patches_are_applied_here() -> None:
    """Known or allowed: this environment's transformers may be newer than the newest source that was looked at."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "fsdp_sink_patches.check", "--json"]
    for id in ("transformers.flash-sinks", "transformers.packed-masks"):
        command += ["--allow-drift", id]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, schema("check"))
    states = {row["id"]: row["state"] for row in report["patches"]}
    assert states["transformers.flash-sinks"] == "applied"
    assert states["transformers.packed-masks"] == "applied"
    assert report["backends"]["reference"] == "available"
    assert "settings.compressed_attention is 'eager'" in report["backends"]["DeepSeek-V4's kernels"]
