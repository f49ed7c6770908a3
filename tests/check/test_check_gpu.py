"""``check --gpu``: the pair of processes, its verdict, the record, and what a record is worth later."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest
from planted_checkout import CUDA_TORCH, HELPER, PATCH, ROOT, UPSTREAM, Checkout, schema

from fsdp_sink_patches import Measurement, _records, _registry, _validate

NO_CONTROL = HELPER.replace("out = abs(planted.f(1) - 1001) / 1001", "out = 0.0")
ALWAYS_WRONG = HELPER.replace("out = abs(planted.f(1) - 1001) / 1001", "out = float('nan')")
UNPATCHED, PATCHED = "planted.f(1) != 1001", "planted.f(1) == 1001"
RAISES_UNPATCHED = HELPER.replace(
    "import planted",
    "import planted\n    if planted.f(1) != 1001: raise TypeError('no such keyword, see /srv/someone/planted.py')",
)


def test_right_and_wrong_without(checkout: Checkout) -> None:
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right, and wrong without the patch" in done.stdout
    assert re.search(r"planted\.thing  out +0\.00e\+00  1\.00e-06  9\.99e-01", done.stdout)
    assert re.search(r"planted\.thing  1\.5 ms  1\.5 ms +1\.00 +2 MiB +2 MiB +1\.00", done.stdout)
    assert done.stderr.splitlines() == [
        "measuring planted.thing, without the patch",
        "measuring planted.thing, with the patch",
    ]
    assert not (checkout.root / "compat_matrix" / "records").exists()


def test_raising_without_the_patch_is_a_negative_control(checkout: Checkout) -> None:
    checkout.write("patches/planted/_helper.py", RAISES_UNPATCHED)
    done = checkout.check("--gpu", "planted.thing", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without the patch, raises: TypeError: no such keyword, see planted.py" in done.stdout


def test_a_negative_control_that_does_not_fail(checkout: Checkout) -> None:
    checkout.write("patches/planted/_helper.py", NO_CONTROL)
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 1
    assert "proves nothing" in done.stdout


def test_wrong_with_the_patch(checkout: Checkout) -> None:
    checkout.write("patches/planted/_helper.py", ALWAYS_WRONG)
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 1
    assert "out of limits: out nan > 1e-06" in done.stdout


def test_raising_with_the_patch_shows_why(checkout: Checkout) -> None:
    checkout.write("patches/planted/_helper.py", "def measure(device):\n    raise RuntimeError('half-way')\n")
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 1
    assert "failed: exit 1: RuntimeError: half-way" in done.stdout
    assert "_helper.py" in done.stdout  # the traceback


def only_where(condition: str, statements: str) -> str:
    return HELPER.replace("import planted\n", f"import planted, os, sys\n    if {condition}: {statements}\n")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), 9)", "signal 9: no message"),
        ("sys.exit(0)", "it ended without a measurement"),
        ("os._exit(3)", "exit 3: no message"),
        ("print('{}'); os._exit(0)", "it ended without a measurement"),
    ],
    ids=["killed", "exit", "status", "other-json"],
)
def test_a_process_that_dies_is_no_result(checkout: Checkout, end: str, said: str) -> None:
    checkout.write("patches/planted/_helper.py", only_where(PATCHED, end))
    row = checkout.verdict(code=1)
    assert (row["result"], row["verdict"]) == ("failed", f"failed: {said}")
    assert row["control_fails"] is False  # without limits there is nothing to judge it by
    checkout.write("patches/planted/_helper.py", only_where(UNPATCHED, end))
    row = checkout.verdict(code=1)
    assert (row["result"], row["control_fails"]) == ("control-failed", False)
    assert row["verdict"] == f"no negative control: the unpatched process did not finish: {said}"


@pytest.mark.parametrize(("where", "result"), [(PATCHED, "failed"), (UNPATCHED, "control-failed")])
def test_a_process_that_hangs_is_no_result(checkout: Checkout, where: str, result: str) -> None:
    """With a process of its own, as a kernel compiler has, that holds the pipes open when only the child is killed."""
    hangs = "import subprocess; print('half-way', file=sys.stderr, flush=True); subprocess.run(['sleep', '45'])"
    checkout.write("patches/planted/_helper.py", only_where(where, hangs))
    begin = time.monotonic()
    row = checkout.verdict("--timeout", "4", code=1)
    assert time.monotonic() - begin < 30
    assert row["result"] == result
    assert "no result after 4 s" in row["verdict"]
    ended = row["patched" if result == "failed" else "unpatched"]
    assert ended == {"crashed": "no result after 4 s", "stderr": "half-way\n"}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ('errors={"out": float("nan")}, limits={"out": 1.0}', "out nan > 1.0"),
        ('errors={"out": 0.0}, limits={"out": 1.0, "dsink": 1.0}', "dsink was not measured"),
        ('errors={"out": 0.0, "dsink": 9.0}, limits={"out": 1.0}', "dsink has no limit"),
        ('errors={"out": 0.0}, limits={}', "the measurement states no limits"),
        ("errors={}, limits={}", "the measurement states no limits"),
        ('errors={"out": 0.0}, limits={"out": float("inf")}', "out has a limit of inf, which is none"),
        ('errors={"out": 0.0}, limits={"out": float("nan")}', "out has a limit of nan, which is none"),
    ],
    ids=["nan", "missing", "unjudged", "no-limits", "nothing", "inf-limit", "nan-limit"],
)
def test_what_is_not_within_a_limit_is_not_right(checkout: Checkout, stated: str, said: str) -> None:
    wrong = f"return dict({stated}, time_ms=1.0, peak_bytes=0)"
    checkout.write("patches/planted/_helper.py", only_where(PATCHED, wrong))
    row = checkout.verdict(code=1)
    assert (row["result"], row["verdict"]) == ("wrong", f"out of limits: {said}")


@pytest.mark.parametrize(
    ("stated", "fails"),
    [
        ('errors={"out": float("nan")}, limits={"out": 1e-6}', True),
        ('errors={"out": 0.0}, limits={}', False),
        ('errors={}, limits={"out": 1e-6}', False),
        ('errors={"out": 0.5}, limits={"out": 1e-6}', True),
    ],
    ids=["nan", "no-limits", "nothing-measured", "wrong"],
)
def test_only_a_measured_error_is_a_negative_control(checkout: Checkout, stated: str, fails: bool) -> None:
    control = f"return dict({stated}, time_ms=1.0, peak_bytes=0)"
    checkout.write("patches/planted/_helper.py", only_where(UNPATCHED, control))
    row = checkout.verdict(code=int(not fails))
    assert (row["result"], row["control_fails"]) == ("proved" if fails else "control-right", fails)


def test_a_validation_that_returns_no_measurement_is_no_negative_control(checkout: Checkout) -> None:
    text = PATCH.replace(
        "return Measurement(", "import planted\n    if planted.f(1) == 1: return None\n    return Measurement("
    )
    checkout.write("patches/planted/thing.py", text.format(slug="thing", name="f"))
    row = checkout.verdict(code=1)
    assert row["result"] == "control-failed"
    assert "AttributeError" in row["verdict"]


def test_what_an_upstream_prints_does_not_hide_the_measurement(checkout: Checkout) -> None:
    noise = "import atexit; print('loading'); atexit.register(print, 'goodbye')"
    checkout.write("patches/planted/_helper.py", only_where("True", noise))
    assert checkout.verdict()["proves"]


def test_json(checkout: Checkout) -> None:
    checkout.plant("other", "g", PATCH.replace('distribution="planted"', 'distribution="nowhere-to-be-found"'))
    report = checkout.validation("--device", "cpu")
    assert (report["device"], report["environment"]) == ("cpu", None)
    skipped, row = report["patches"]
    assert (skipped["id"], skipped["result"], skipped["patched"]) == ("planted.other", "skipped", None)
    assert "nowhere-to-be-found is not installed" in skipped["verdict"]
    assert (row["id"], row["result"], row["proves"], row["control_fails"]) == ("planted.thing", "proved", True, True)
    assert row["patched"] == {
        "errors": {"out": 0.0},
        "limits": {"out": 1e-6},
        "time_ms": 1.5,
        "peak_bytes": 2**21,
        "details": {"on": "cpu"},
    }
    assert row["unpatched"]["errors"]["out"] > 0.9
    assert row["record"] is None
    assert checkout.validation("planted.other", "--device", "cpu", code=1)["patches"][0]["result"] == "skipped"
    checkout.write("upstream/torch.py", CUDA_TORCH + "    print('a torch that prints')\n")
    report = checkout.validation("--record", "--cell", "card")
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert report["patches"][1]["record"] == "compat_matrix/records/planted.thing/card.json"


def test_the_surrounding_choice_of_patches_does_not_reach_the_children(checkout: Checkout) -> None:
    done = checkout.check(
        "--gpu", "--device", "cpu", FSDP_SINK_PATCHES_DISABLE="planted.thing", FSDP_SINK_PATCHES="all"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_drift_has_to_be_allowed(checkout: Checkout) -> None:
    checkout.install("1.6", UPSTREAM.replace("def helper(x):\n    return x", "def helper(x):\n    return -x"))
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 1
    assert "planted.thing: not measured, drifted" in done.stdout
    assert checkout.check("--gpu", "--device", "cpu", "--allow-drift", "planted.thing").returncode == 0


def test_an_absent_upstream_is_skipped_unless_named(checkout: Checkout) -> None:
    checkout.plant("other", "g", PATCH.replace('distribution="planted"', 'distribution="nowhere-to-be-found"'))
    done = checkout.check("--gpu", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planted.other: skipped, absent. nowhere-to-be-found is not installed" in done.stdout
    assert "right, and wrong without the patch" in done.stdout
    assert checkout.check("--gpu", "planted.other", "--device", "cpu").returncode == 1


def test_no_card_and_no_record_on_a_cpu(checkout: Checkout) -> None:
    done = checkout.check("--gpu")
    assert done.returncode == 2
    assert "--gpu needs a CUDA device: ImportError: libplanted.so: cannot open" in done.stderr
    done = checkout.check("--gpu", "--device", "cpu", "--record")
    assert done.returncode == 2
    assert "a CPU runs none of the kernels" in done.stderr


@pytest.fixture
def recorded(checkout: Checkout) -> dict[str, Any]:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    checkout.write("patches/planted/_helper.py", RAISES_UNPATCHED)
    done = checkout.check("--gpu", "--record", "--cell", "h200-planted1.5")
    assert done.returncode == 0, done.stdout + done.stderr
    path = checkout.root / "compat_matrix" / "records" / "planted.thing" / "h200-planted1.5.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_what_is_recorded(checkout: Checkout, recorded: dict[str, Any]) -> None:
    jsonschema.validate(recorded, schema("record"))
    assert recorded["unpatched"] == {"raises": "TypeError: no such keyword, see planted.py"}
    assert recorded["patched"]["errors"] == {"out": 0.0}
    assert recorded["patched"]["details"] == {"on": "cuda"}
    assert recorded["environment"]["gpu"] == "NVIDIA H200"
    assert recorded["command"].endswith(" --gpu planted.thing --record --cell h200-planted1.5")
    assert recorded["upstream"]["version"] == "1.5"
    ours = "fsdp_sink_patches.patches.planted"
    assert set(recorded["sources"]) == {ours, f"{ours}._helper", f"{ours}.thing"}
    assert "/" not in json.dumps(recorded).replace("https://", "")


def test_a_record_speaks_for_the_code_it_was_made_of(checkout: Checkout, recorded: dict[str, Any]) -> None:
    record = checkout.row("--static")["gpu_record"]
    assert record == {
        "state": "validated",
        "cell": "h200-planted1.5",
        "gpu": "NVIDIA H200",
        "date": recorded["date"],
        "changed": [],
    }
    assert f"validated (H200, {recorded['date'][:10]})" in checkout.check("--static").stdout

    checkout.install("1.9")  # another release with the same source
    assert checkout.row("--static")["gpu_record"]["state"] == "validated"

    checkout.write("patches/planted/_helper.py", "# only a comment\n" + RAISES_UNPATCHED)
    assert checkout.row("--static")["gpu_record"]["state"] == "validated"

    checkout.write("patches/planted/_helper.py", RAISES_UNPATCHED.replace("1e-6", "1e-5"))
    record = checkout.row("--static")["gpu_record"]
    assert (record["state"], record["changed"]) == ("stale", ["fsdp_sink_patches.patches.planted._helper"])
    assert "stale (H200, " in checkout.check("--static").stdout

    checkout.write("patches/planted/_helper.py", RAISES_UNPATCHED)
    checkout.install("1.9", UPSTREAM + "def later(x):\n    return x\n")
    record = checkout.row("--static", code=1)["gpu_record"]
    assert (record["state"], record["changed"]) == ("stale", ["planted:later"])


def test_the_command_of_a_record_keeps_what_was_allowed(checkout: Checkout) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    checkout.install("1.6", UPSTREAM.replace("def helper(x):\n    return x", "def helper(x):\n    return -x"))
    done = checkout.check("--gpu", "--record", "--cell", "card", "--allow-drift", "planted.thing")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((checkout.root / "compat_matrix/records/planted.thing/card.json").read_text())
    asked = "--gpu planted.thing --record --cell card --allow-drift planted.thing"
    assert record["command"] == f"python -m fsdp_sink_patches.check {asked}"


def test_where_a_record_went_is_said_from_where_the_user_is(checkout: Checkout, tmp_path_factory: Any) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    done = checkout.check("--gpu", "--record", "--cell", "card")
    lines = done.stdout.splitlines()
    assert "planted.thing: recorded in compat_matrix/records/planted.thing/card.json" in lines
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = checkout.check("--gpu", "--record", "--cell", "card", "--record-dir", str(elsewhere))
    assert f"planted.thing: recorded in {elsewhere.resolve()}/planted.thing/card.json" in done.stdout.splitlines()


def test_a_folder_that_can_not_be_written_is_said_before_measuring(checkout: Checkout) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    checkout.write("file", "")
    done = checkout.check("--gpu", "--record", "--record-dir", "file/records")
    assert done.returncode == 2
    assert "no record can be written to file/records; give a --record-dir" in done.stderr
    assert "measuring" not in done.stderr


def test_nothing_is_recorded_of_what_proves_nothing(checkout: Checkout) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    checkout.write("patches/planted/_helper.py", NO_CONTROL)
    done = checkout.check("--gpu", "--record", "--record-dir", "kept")
    assert done.returncode == 1
    assert "no record written: proves nothing" in done.stdout
    assert not (checkout.root / "kept").exists()


def test_the_cell_is_named_after_card_torch_and_transformers(checkout: Checkout) -> None:
    checkout.write("upstream/torch.py", CUDA_TORCH)
    done = checkout.check("--gpu", "--record", "--record-dir", "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (checkout.root / "kept" / "planted.thing").iterdir()
    assert re.fullmatch(r"h200-torch2\.11-transformers\d+\.\d+\.json", path.name)
    assert _validate.cell_name({"gpu": "NVIDIA GeForce RTX 4090", "torch": "2.8.1+cu128", "transformers": None}) == (
        "geforce-rtx-4090-torch2.8"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "it has no 'schema'"),
        ("[]", "it holds a list"),
        ('{"schema": 1, "patch": "planted.thing", ', "Expecting property name"),
        ('{"schema": 99, "patch": "planted.thing"}', "its schema is 99"),
        ('{"schema": 1, "patch": "planted.other"}', "its patch is 'planted.other'"),
        ('{"schema": 1, "patch": "planted.thing", "date": 5}', "it has no 'date'"),
        ("\x00", "Expecting value"),
    ],
    ids=["empty", "list", "truncated", "schema", "patch", "fields", "binary"],
)
def test_a_file_that_is_no_record_is_named(checkout: Checkout, text: str, why: str) -> None:
    folder = checkout.root / "compat_matrix" / "records" / "planted.thing"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text(text)
    report = checkout.report("--static", code=1)
    jsonschema.validate(report, schema("check"))
    (row,) = report["patches"]
    assert (row["state"], row["fails"], row["gpu_record"]["state"]) == ("armed", True, "unreadable")
    done = checkout.check("--static")
    assert done.returncode == 1
    assert re.search(r"^planted\.thing .*  armed \(would apply\)  unreadable$", done.stdout, re.MULTILINE)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("planted.thing: "))
    assert "compat_matrix/records/planted.thing/mine.json" in line
    assert why in line
    assert "python -m fsdp_sink_patches.check --gpu planted.thing --record" in line


def test_a_broken_record_beside_a_good_one_is_not_passed_over(checkout: Checkout, recorded: dict[str, Any]) -> None:
    folder = checkout.root / "compat_matrix" / "records" / "planted.thing"
    (folder / "older.json").write_text(json.dumps({key: recorded[key] for key in recorded if key != "sources"}))
    row = checkout.row(code=1)
    assert (row["state"], row["gpu_record"]["state"]) == ("applied", "unreadable")
    assert "older.json" in row["reason"]
    assert "it has no 'sources'" in row["reason"]
    (folder / "older.json").rename(folder / "older.json~")
    assert "older.json~" in checkout.row("--static", code=1)["reason"]
    (folder / "older.json~").unlink()
    assert checkout.row()["gpu_record"]["state"] == "validated"


def test_numbers_survive_json() -> None:
    nan = float("nan")
    plain = _validate.as_json(Measurement({"a": nan, "b": float("inf")}, {"a": 1.0, "b": 1.0}, 1.0, 0, {"t": (1, 2)}))
    assert json.loads(json.dumps(plain, allow_nan=False))["errors"] == {"a": "nan", "b": "inf"}
    assert not _validate.is_right(plain)
    assert not _validate.is_right({"errors": {}, "limits": {}})
    assert not _validate.is_right({"errors": {}, "limits": {"a": 1.0}})
    assert _validate.is_right({"errors": {"a": 1.0}, "limits": {"a": 1.0}})


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("OSError: /srv/someone/lib/libx.so: cannot open", "OSError: libx.so: cannot open"),
        (r"see C:\Users\someone\x.py", "see x.py"),
        ("OSError:/srv/someone/x.py file:///srv/someone/y.py", "OSError:x.py y.py"),
        ("https://example.org/a/b and a/b", "https://example.org/a/b and a/b"),
    ],
)
def test_paths_are_cut(text: str, clean: str) -> None:
    assert _validate.without_paths(text) == clean


@pytest.mark.parametrize("id", ["transformers.flash-sinks", "transformers.packed-masks", "flash-attn.varlen-sinks"])
def test_a_record_of_ours_covers_all_that_its_numbers_depend_on(id: str) -> None:
    names = set(_records.sources(_registry.get(id)))
    root = "fsdp_sink_patches"
    folder, slug = id.replace("-", "_").split(".")
    assert f"{root}.patches.{folder}.{slug}" in names
    assert f"{root}.patches.{folder}._validation" in names
    ops = {path.stem for path in (ROOT / root / "ops" / "sink_attention").glob("*.py")} - {"__init__"}
    assert {"oracle", "_op"} <= ops
    assert {f"{root}.ops.sink_attention.{name}" for name in ops} <= names
    assert f"{root}.check" not in names
