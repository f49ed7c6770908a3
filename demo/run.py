"""``make demo``: the same training job without and with this package, and how wrong each one is.

Trains ``demo/train.py`` twice, in processes of their own: unpatched in eager attention, the accepted workaround for
gpt-oss today, and patched in flash attention. Then it measures both against an fp64 oracle: the eager model in fp64
with the weights of that very step, every document run by itself, in this process, where no patch is applied.

Writes ``demo_out/errors.png`` and ``demo_out/results.json``. Exit 0: the patched run is right; 1: it is not, or a run
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent


class RunFailedError(Exception):
    """A training process ended with an error; the message holds the end of what it wrote."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    attn_implementation: str
    patched: bool
    color: str


JOBS = (Job("unpatched", "eager", False, "#c0392b"), Job("patched", "flash_attention_2", True, "#1f77b4"))

# Largest error that counts as right, in nats (log-probabilities) or relative (gradient), by compute dtype. fp32 sums in
# another order than the oracle; bf16 has 8 bits, and now and then a token takes another expert.
LIMITS = {
    "float32": {"logprob_error": 1e-4, "packed_against_alone": 1e-4, "dsink_error": 1e-3},
    "bfloat16": {"logprob_error": 1e-2, "packed_against_alone": 1e-2, "dsink_error": 5e-2},
}


def environment() -> dict[str, str]:
    """A training process decides for itself: no ambient choice of patches, no hub, one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}


def train(job: Job, args: argparse.Namespace, out: Path) -> Iterator[dict[str, Any]]:
    """Run one job; yields what it prints, a dict a step."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
        str(HERE / "train.py"), "--attn", job.attn_implementation, "--steps", str(args.steps),
        "--measure-every", str(args.measure_every), "--seq-len", str(args.seq_len), "--device", args.device,
        "--dtype", args.dtype, "--out", str(out), *(["--patched"] if job.patched else []),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            if process.wait() != 0:
                errors.seek(0)
                raise RunFailedError(f"the {job.name} run exited {process.returncode}\n{errors.read()[-4000:]}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def flash_without_us() -> str:
    """What ``attn_implementation="flash_attention_2"`` gives for gpt-oss today without us, in one line."""
    code = (
        "import train\n"
        "try:\n    got = train.build_model('flash_attention_2').config._attn_implementation\n"
        "except Exception as error:\n    got = f'{type(error).__name__}: {error}'\n"
        "print('\\n' + ' '.join(got.split()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=environment(), capture_output=True, text=True)
    return done.stdout.strip().rpartition("\n")[2] or f"exit {done.returncode}: {done.stderr.strip()[-200:]}"


def against_oracle(path: Path, compute_dtype: str) -> dict[str, float]:
    """The errors of one measured step against the fp64 oracle.

    ``logprob_error``: mean |difference| of the log-probability of a token, in nats, every document after the first of
    its row (the first one has nothing to leak from). ``packed_against_alone``: the same difference inside the training
    process, packed row against each document alone. ``dsink_error``: ||difference|| / ||oracle|| of the gradient of the
    loss for all sinks. ``loss``, ``oracle_loss``: what the job reports, and what its weights are worth.
    """
    import torch
    from train import Row, build_model, logprobs_alone, sink_gradients

    saved = torch.load(path, weights_only=True)
    model = build_model("eager").double()
    model.set_experts_implementation("eager")  # torch's grouped matmul, the default, takes no fp64
    # The forward of a bf16 job sees its weights in bf16.
    dtype = getattr(torch, compute_dtype)
    model.load_state_dict({name: w.to(dtype).double() for name, w in saved["weights"].items()})
    expected, lengths, losses = [], [], []
    for row in saved["rows"]:
        documents = logprobs_alone(model, Row(**row))
        expected.append(torch.cat(documents).detach())
        lengths.append(len(documents[0]))
        losses.append(-torch.cat(documents).mean())
    loss = torch.stack(losses).mean()  # FSDP averages the ranks' gradients
    loss.backward()
    dsink = sink_gradients(model)

    def mean_error(found: list[Any], wanted: list[Any]) -> float:
        pairs = zip(found, wanted, lengths, strict=True)
        return float(torch.cat([(f.double() - w.double())[first:].abs() for f, w, first in pairs]).mean())

    return {
        "logprob_error": mean_error(saved["logprobs"], expected),
        "packed_against_alone": mean_error(saved["logprobs"], saved["alone"]),
        "dsink_error": float((saved["sink_gradients"].double() - dsink).norm() / dsink.norm()),
        "loss": float(torch.stack([-found.double().mean() for found in saved["logprobs"]]).mean()),
        "oracle_loss": float(loss.detach()),
    }


def evaluate(out: Path, advance: Callable[[], None]) -> dict[str, Any]:
    """result.json of one run, plus ``errors``: one dict a measured step, oldest first."""
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    result["errors"] = []
    for path in sorted(out.glob("measure-*.pt")):
        errors = against_oracle(path, result["compute_dtype"])
        result["errors"].append({"step": int(path.stem.rpartition("-")[2])} | errors)
        advance()
    return result


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Both runs side by side, at the last measured step."""
    some = results["patched"]
    documents = "-".join(str(n) for n in sorted({min(some["documents_per_row"]), max(some["documents_per_row"])}))
    found = Table(
        title=f"after {some['errors'][-1]['step']} steps of a tiny gpt-oss: FSDP2, {some['ranks']} x {some['device']}, "
        f"{some['compute_dtype']}\nrows of {some['seq_len']} tokens, {documents} documents each",
        title_justify="left",
        title_style="bold",
    )
    found.add_column("")
    for name, result in results.items():
        found.add_column(f"{name}\n{result['attn_implementation']}", justify="right")
    last = {name: result["errors"][-1] for name, result in results.items()}
    limits = LIMITS[some["compute_dtype"]]

    def error(name: str, key: str) -> str:
        color = "green" if last[name][key] <= limits[key] else "red"
        return f"[{color}]{last[name][key]:.1e}[/{color}]"

    labels = {
        "logprob_error": "log-prob error against fp64 oracle (nats)",
        "packed_against_alone": "packed against alone (nats)",
        "dsink_error": "gradient of the sinks, relative error",
    }
    for key, label in labels.items():
        found.add_row(label, *(error(name, key) for name in results))
    found.add_row("held-out loss it reports", *(f"{last[name]['loss']:.3f}" for name in results))
    found.add_row("held-out loss of its weights (oracle)", *(f"{last[name]['oracle_loss']:.3f}" for name in results))
    found.add_row("tokens/s", *(f"{result['tokens_per_second']:,.0f}" for result in results.values()))
    kind = "resident memory of a rank" if some["device"] == "cpu" else "device memory"
    found.add_row(f"peak {kind} (MiB)", *(f"{r['peak_bytes'] / 2**20:,.0f}" for r in results.values()))
    return found


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The log-prob error of both runs over the training steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), dpi=150)
    for job in JOBS:
        errors = results[job.name]["errors"]
        steps, values = [e["step"] for e in errors], [e["logprob_error"] for e in errors]
        axes.plot(steps, values, color=job.color, marker="o", markersize=4, linewidth=2)
        axes.annotate(
            f"{job.name}: {job.attn_implementation}", (steps[-1], values[-1]), xytext=(0, 9),
            textcoords="offset points", ha="right", color=job.color, fontweight="bold",
        )  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 4)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean |Δ log-probability| (nats)")
    axes.set_title("Error of packed gpt-oss training against the fp64 oracle", loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def right(result: dict[str, Any]) -> bool:
    """Every error of every measured step within the limit of its dtype; NaN is not."""
    limits = LIMITS[result["compute_dtype"]]
    return all(errors[name] <= limit for errors in result["errors"] for name, limit in limits.items())


def arguments() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--measure-every", type=int, default=10)
    parser.add_argument("--seq-len", type=int, help="tokens a row (CPU 512, CUDA 4096)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(LIMITS), help="compute dtype (CPU float32, CUDA bfloat16)")
    parser.add_argument("--ranks", type=int, help="processes (CPU 2, CUDA 1)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else, on stdout")
    args = parser.parse_args()
    args.seq_len = args.seq_len or (4096 if args.device == "cuda" else 512)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.ranks = args.ranks or (1 if args.device == "cuda" else 2)
    return args


def run_jobs(args: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    """Train every job, then measure every saved step; results by job name."""
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress,
    ):
        folders = {job: Path(scratch) / job.name for job in JOBS}
        bars = {job: progress.add_task(f"train, {job.name}", total=args.steps, note="", start=False) for job in JOBS}
        oracle = progress.add_task("fp64 oracle", total=None, note="", start=False)
        for job, folder in folders.items():
            progress.start_task(bars[job])
            for step in train(job, args, folder):
                progress.update(bars[job], completed=step["step"], note=f"loss {step['loss']:.3f}")
            progress.stop_task(bars[job])
        progress.update(oracle, total=sum(len(list(folder.glob("measure-*.pt"))) for folder in folders.values()))
        progress.start_task(oracle)
        return {job.name: evaluate(folder, lambda: progress.advance(oracle)) for job, folder in folders.items()}


CHECK = [sys.executable, "-m", "fsdp_sink_patches.check"]


def check() -> Any:
    """The check's report on this machine, as JSON."""
    done = subprocess.run([*CHECK, "--json"], capture_output=True, text=True, check=False, env=environment())
    if done.returncode > 1 or not done.stdout:  # 1 is a finding, and is shown
        raise RunFailedError(f"{' '.join(CHECK)} exited {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def main() -> int:
    args = arguments()
    begin = time.perf_counter()
    console = Console(stderr=args.json)
    args.out.mkdir(parents=True, exist_ok=True)
    results = run_jobs(args, console)
    plot(results, args.out / "errors.png")
    summary = {
        "right": right(results["patched"]),
        "flash_attention_2_without_us": flash_without_us(),
        "seconds": round(time.perf_counter() - begin, 1),
        "runs": results,
        "check": check(),
    }
    text = json.dumps(summary, indent=2) + "\n"
    (args.out / "results.json").write_text(text)
    if args.json:
        sys.stdout.write(text)
    else:
        console.print(table(results))
        console.print(
            f"flash_attention_2 without us: [red]{escape(str(summary['flash_attention_2_without_us']))}[/red]\n"
        )
        subprocess.run(CHECK, check=False, env=environment())  # straight to the terminal, with its colours
        console.print(f"\n{args.out / 'errors.png'}: the two error curves. {args.out / 'results.json'}: every number.")
        verdict = "[green]right[/green]" if summary["right"] else "[red]wrong[/red]"
        console.print(f"The patched run is {verdict} at every measured step ({summary['seconds']:.0f} s in all).")
    return 0 if summary["right"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailedError as failed:
        sys.exit(f"demo: {failed}")
