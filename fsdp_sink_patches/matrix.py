"""``python -m fsdp_sink_patches.matrix``: digest upstream releases without installing them, and write tables.

    matrix refresh transformers==5.24.0 'flash-attn>=2.8'            fetch, digest, extend compat_matrix/<upstream>.toml
    matrix refresh 'transformers>=4.57' --from DIR                   the same, from files that are already here
    matrix table [--check]                                           MATRIX.md and README's table, from the evidence

A release whose source has the digests we know extends a list of versions. A new digest is printed with what changed,
and is written only with ``--accept``, which says that a person looked.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import sys
import tarfile
import tempfile
import tokenize
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fsdp_sink_patches import _fingerprint, _gates, _records, _registry
from fsdp_sink_patches._fingerprint import Shape
from fsdp_sink_patches._patch import Patch

BEGIN, END = "<!-- patches:begin -->", "<!-- patches:end -->"


class MatrixError(Exception):
    """The tool can't do what was asked; the message says what to do."""


# --- releases: where they come from --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """A wheel or sdist on disk."""

    distribution: str
    version: Version
    path: Path


def parse_requirements(texts: Sequence[str], *, bare: bool) -> list[Requirement]:
    """Requirements of known distributions. Without ``bare``, each must say which versions it means."""
    known = {canonicalize_name(patch.distribution) for patch in _registry.patches().values()}
    parsed = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise MatrixError(f"{text!r} is not a requirement such as 'transformers==5.24.0': {error}") from error
        if canonicalize_name(requirement.name) not in known:
            raise MatrixError(
                f"{requirement.name!r} is not the upstream of any patch; these are: {', '.join(sorted(known))}"
            )
        if not requirement.specifier and not bare:
            raise MatrixError(
                f"{text!r} does not say which releases. Write {requirement.name}==X.Y.Z (several, or a range such as "
                f"'{requirement.name}>=X.Y'), or give --from DIR to digest every {requirement.name} file in a folder."
            )
        parsed.append(requirement)
    return parsed


def archive(path: Path) -> Archive | None:
    """What a file is, by its name; None if it is neither a wheel nor an sdist."""
    try:
        if path.suffix == ".whl":
            name, version = parse_wheel_filename(path.name)[:2]
        else:
            name, version = parse_sdist_filename(path.name)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return Archive(str(name), version, path)


def in_directory(directory: Path, requirements: Iterable[Requirement]) -> list[Archive]:
    """The files in ``directory`` that satisfy some requirement, oldest release first, a wheel before an sdist."""
    here = [found for path in sorted(directory.iterdir()) if (found := archive(path)) is not None]
    chosen: dict[tuple[str, Version], Archive] = {}
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        matching = [a for a in here if a.distribution == name and _admits(requirement.specifier, a.version)]
        if not matching:
            raise MatrixError(f"no file in {directory} satisfies {requirement}; found for {name}: {_names(here, name)}")
        for found in sorted(matching, key=lambda a: a.path.suffix != ".whl"):
            chosen.setdefault((found.distribution, found.version), found)
    return [chosen[key] for key in sorted(chosen)]


def _names(archives: Iterable[Archive], name: str) -> str:
    return (
        ", ".join(str(a.version) for a in sorted(archives, key=lambda a: a.version) if a.distribution == name) or "none"
    )


def _admits(specifier: SpecifierSet, version: Version) -> bool:
    # packaging 25 and 26 differ on pre-releases unless they are asked for; a range without one means final releases.
    return specifier.contains(version, prereleases=True) and (
        not version.is_prerelease or specifier.prereleases is True
    )


def fetch(requirements: Sequence[Requirement], progress: Progress, use: Callable[[Archive], None]) -> None:
    """Download each matching release in turn, hand it to ``use``, and delete it.

    pip finds and fetches, so that its index, find-links, proxy, certificate and credentials settings hold. Its finder
    is driven directly because every public command runs an sdist's ``setup.py`` for metadata, and flash-attn's needs
    torch.
    """
    try:
        command = importlib.import_module("pip._internal.commands.download").DownloadCommand("download", "")
        options_module = importlib.import_module("pip._internal.cli.cmdoptions")
    except (ImportError, AttributeError) as error:
        raise MatrixError(f"pip can't be driven from here ({error}). Download the files and use --from DIR.") from error
    failure: list[BaseException] = []

    def run(options: Any, args: list[str]) -> int:
        session = command.get_default_session(options)
        finder = command._build_package_finder(
            options=options,
            session=session,
            target_python=options_module.make_target_python(options),
            ignore_requires_python=True,
        )
        try:
            links = [found for requirement in requirements for found in _links(finder, requirement)]
            overall = progress.add_task("releases", total=len(links))
            with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
                for name, version, link in links:
                    path = Path(scratch) / link.filename
                    task = progress.add_task(f"{name} {version}")
                    _download(session, link, path, progress, task)
                    use(Archive(name, version, path))
                    path.unlink()
                    progress.remove_task(task)
                    progress.advance(overall)
        except BaseException as error:  # pip would log any exception as its own crash; raised again below
            failure.append(error)
        return 0

    command.run = run
    status = command.main(["-qq"])
    if failure and isinstance(failure[0], OSError):  # every error of requests is one
        raise MatrixError(f"could not fetch: {failure[0]}. Try again, or use --from DIR.") from failure[0]
    if failure:
        raise failure[0]
    if status:
        raise MatrixError(f"pip stopped with status {status}; its message is above. Or use --from DIR.")


def _links(finder: Any, requirement: Requirement) -> Iterator[tuple[str, Version, Any]]:
    name = canonicalize_name(requirement.name)
    pinned = any(part.operator in ("==", "===") for part in requirement.specifier)
    best: dict[Version, Any] = {}
    everything = finder.find_all_candidates(requirement.name)
    for candidate in everything:
        version = Version(str(candidate.version))
        if not _admits(requirement.specifier, version) or (candidate.link.is_yanked and not pinned):
            continue
        if version not in best or (candidate.link.is_wheel and not best[version].is_wheel):
            best[version] = candidate.link
    if not best:
        if not everything:
            raise MatrixError(f"pip found no {name} at all: is its index reachable? Or use --from DIR.")
        newest = max(Version(str(candidate.version)) for candidate in everything)
        raise MatrixError(f"the index has no release that satisfies {requirement}; the newest {name} is {newest}")
    return ((name, version, best[version]) for version in sorted(best))


def _download(session: Any, link: Any, path: Path, progress: Progress, task: TaskID) -> None:
    response = session.get(link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"})
    response.raise_for_status()
    progress.update(task, total=int(response.headers.get("content-length", 0)) or None)
    check = hashlib.new(link.hash_name) if link.hash_name else None
    with path.open("wb") as file:
        for block in response.iter_content(1 << 18):
            file.write(block)
            if check is not None:
                check.update(block)
            progress.advance(task, len(block))
    if check is not None and check.hexdigest() != link.hash:
        raise MatrixError(f"{link.filename}: the {link.hash_name} of what arrived is not the index's. Try again.")


def unpack(found: Archive, into: Path, refs: Iterable[str]) -> Path:
    """Write the files of a wheel or sdist that ``refs`` live in below ``into``; returns where their packages lie."""
    modules = {ref.partition(":")[0] for ref in refs}
    wanted = set()
    for module in modules:
        steps = module.split(".")
        wanted |= {"/".join([*steps[:n], "__init__.py"]) for n in range(1, len(steps) + 1)} | {"/".join(steps) + ".py"}
    for name, read in _members(found.path):
        parts = PurePosixPath(name).parts
        if not any("/".join(parts[-n:]) in wanted for n in range(1, len(parts) + 1)):
            continue
        if ".." in parts or PurePosixPath(name).is_absolute():
            raise MatrixError(f"{found.path.name} holds {name!r}, which points outside the archive")
        target = into.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read())
    packages = sorted({module.partition(".")[0] for module in modules})
    bases = [into] if found.path.suffix == ".whl" else [b for top in into.iterdir() for b in (top / "src", top)]
    for base in bases:
        if all((base / name).is_dir() or (base / f"{name}.py").is_file() for name in packages):
            return base
    raise MatrixError(f"{found.path.name} holds no {' and no '.join(packages)}, or none of the modules patches name")


def _members(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive_file:
            for name in archive_file.namelist():
                yield name, functools.partial(archive_file.read, name)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and (handle := tar.extractfile(member)) is not None:
                yield member.name, handle.read


def source(ref: str, root: Path | None) -> str:
    """The lines of a symbol, every definition of it, for a person to read; empty where it is absent."""
    nodes = _fingerprint.definitions(ref, root)
    if not nodes:
        return ""
    with tokenize.open(_fingerprint.locate(ref, root)[0]) as file:
        lines = file.read().split("\n")
    cut = []
    for node in nodes:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        cut += lines[first - 1 : node.end_lineno]
    return "\n".join(cut) + "\n"


# --- shapes --------------------------------------------------------------------------------------------------------


def learn(shapes: Iterable[Shape], version: str, digests: Mapping[str, str]) -> tuple[Shape, ...]:
    """``shapes`` with ``version`` listed under ``digests`` and nowhere else; versions and shapes in order."""
    merged: list[Shape] = []
    placed = False
    for shape in shapes:
        versions = {v for v in shape.versions if v != version}
        if shape.digests == digests:
            versions.add(version)
            placed = True
        if versions:
            merged.append(Shape(tuple(sorted(versions, key=Version)), dict(shape.digests)))
    if not placed:
        merged.append(Shape((version,), dict(digests)))
    return tuple(sorted(merged, key=lambda shape: Version(shape.versions[0])))


def nearest(shapes: Iterable[Shape], version: str, refs: Iterable[str]) -> tuple[str, Shape] | None:
    """The known release closest below ``version``, else closest above, among shapes of exactly these refs."""
    wanted = set(refs)
    known = {Version(v): (v, s) for s in shapes if set(s.digests) == wanted for v in s.versions if v != version}
    below = [v for v in known if v < Version(version)]
    if not known:
        return None
    return known[max(below)] if below else known[min(known)]


def render_toml(shapes: Mapping[str, Sequence[Shape]]) -> str:
    """The text of ``compat_matrix/<upstream>.toml``: per patch id, an array of shapes."""
    lines = [
        "# Written by `python -m fsdp_sink_patches.matrix refresh`; not by hand. A shape is one form of upstream",
        "# source that a patch was checked against: the releases that have it, and the digest of every symbol.",
    ]
    for patch_id in sorted(shapes):
        for shape in shapes[patch_id]:
            lines += ["", f"[[{_quoted(patch_id)}]]", "versions = ["]
            row = " "
            for version in shape.versions:
                if len(row) + len(version) + 4 > 116:
                    lines.append(row)
                    row = " "
                row += f" {_quoted(version)},"
            lines += [row, "]", "", f"[{_quoted(patch_id)}.digests]"]
            lines += [f"{_quoted(ref)} = {_quoted(digest)}" for ref, digest in shape.digests.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # The strings here are ids, versions, refs and digests: JSON's quoting is TOML's basic string.
    return json.dumps(text)


# --- refresh -------------------------------------------------------------------------------------------------------


class Refresh:
    """One run of ``matrix refresh``: what was found, and what is to be written."""

    def __init__(self, accept: bool, folder: Path | None = None) -> None:
        self.accept = accept
        self.folder = folder
        self.shapes = {patch.id: list(_fingerprint.shapes(patch)) for patch in _registry.patches().values()}
        self.findings: list[dict[str, Any]] = []
        self.touched: set[str] = set()
        self._texts: dict[tuple[str, str], dict[str, str]] = {}

    def digest(self, found: Archive) -> list[dict[str, Any]]:
        """Compare one release with what each of its patches knows; returns and keeps the findings."""
        version = str(found.version)
        here = [p for p in _registry.patches().values() if canonicalize_name(p.distribution) == found.distribution]
        inside = [patch for patch in here if _in_range(patch, found.version)]
        results = [
            {"patch": patch.id, "distribution": patch.distribution, "version": version, "result": "outside"}
            for patch in here
            if patch not in inside
        ]
        if inside:
            with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
                refs = {ref for patch in inside for ref in _fingerprint.refs(patch)}
                root = unpack(found, Path(scratch), refs)
                self._texts[found.distribution, version] = {ref: source(ref, root) for ref in refs}
                results += [self._compare(patch, version, root) for patch in inside]
            _fingerprint.forget()
        self.findings += results
        return results

    def _compare(self, patch: Patch, version: str, root: Path) -> dict[str, Any]:
        digests = {ref: _fingerprint.digest(ref, root) for ref in _fingerprint.refs(patch)}
        finding: dict[str, Any] = {"patch": patch.id, "distribution": patch.distribution, "version": version}
        shapes = self.shapes[patch.id]
        same = next((shape for shape in shapes if shape.digests == digests), None)
        if same is not None and version in same.versions:
            return {**finding, "result": "known"}
        if same is not None:
            self._learn(patch, version, digests)
            return {**finding, "result": "extended", "like": same.versions[-1]}
        near = nearest(shapes, version, digests)
        finding["against"] = near[0] if near else None
        finding["changed"] = [
            {"ref": ref, "found": digest, "known": near[1].digests[ref] if near else None}
            for ref, digest in digests.items()
            if near is None or near[1].digests[ref] != digest
        ]
        if self.accept:
            self._learn(patch, version, digests)
        return {**finding, "result": "accepted" if self.accept else "new"}

    def _learn(self, patch: Patch, version: str, digests: Mapping[str, str]) -> None:
        self.shapes[patch.id] = list(learn(self.shapes[patch.id], version, digests))
        self.touched.add(patch.distribution)

    def diff(self, finding: Mapping[str, Any], ref: str) -> str | None:
        """A unified diff of a symbol between the two releases of a finding, when both sources are at hand."""
        name = canonicalize_name(finding["distribution"])
        before, after = (self._text(name, finding[key], ref) for key in ("against", "version"))
        if before is None or after is None:
            return None
        labels = (f"{ref} {finding['against']}", f"{ref} {finding['version']}")
        return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *labels, n=2))

    def _text(self, name: str, version: str | None, ref: str) -> str | None:
        if version is None:
            return None
        texts = self._texts.setdefault((name, version), {})
        if ref not in texts and self.folder is not None:
            wanted = Requirement(f"{name}=={version}")
            for found in (a for p in sorted(self.folder.iterdir()) if (a := archive(p)) is not None):
                if found.distribution == name and _admits(wanted.specifier, found.version):
                    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
                        root = unpack(found, Path(scratch), [ref])
                        texts[ref] = source(ref, root)
                    break
        if ref not in texts and _installed(name) == version:
            texts[ref] = source(ref, None)
        return texts.get(ref)

    def write(self) -> list[str]:
        """Write the TOML of each distribution that learned something; returns the file names."""
        written = []
        for distribution in sorted(self.touched):
            mine = {p.id: self.shapes[p.id] for p in _registry.patches().values() if p.distribution == distribution}
            path = _fingerprint.matrix_directory() / f"{distribution.replace('-', '_')}.toml"
            path.write_text(render_toml(mine), encoding="utf-8")
            written.append(path.name)
        return written

    @property
    def unknown(self) -> list[dict[str, Any]]:
        return [finding for finding in self.findings if finding["result"] == "new"]

    def outdated(self) -> dict[str, list[str]]:
        """By patch, releases known only by symbols that the patch no longer declares: they can't match any more."""
        left = {
            id: [v for s in self.shapes[id] if set(s.digests) != set(_fingerprint.refs(patch)) for v in s.versions]
            for id, patch in _registry.patches().items()
        }
        return {id: versions for id, versions in left.items() if versions}


def _in_range(patch: Patch, version: Version) -> bool:
    if not _gates.contains(patch.requires, version) or _gates.refusal(patch, version):
        return False
    return patch.fixed_in is None or version < Version(patch.fixed_in)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def refresh(options: argparse.Namespace, out: Console) -> int:
    folder: Path | None = options.from_directory
    if folder is not None and not folder.is_dir():
        raise MatrixError(f"--from {folder}: no such folder")
    requirements = parse_requirements(options.requirement, bare=folder is not None)
    run = Refresh(options.accept, folder)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if folder is None else TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=options.json or not sys.stderr.isatty(),
    )

    def use(found: Archive) -> None:
        for finding in run.digest(found):
            if not options.json:
                _print_finding(run, finding, out)

    with progress:
        if folder is not None:
            archives = in_directory(folder, requirements)
            task = progress.add_task("releases", total=len(archives))
            for found in archives:
                use(found)
                progress.advance(task)
        else:
            fetch(requirements, progress, use)
    written = run.write()
    code = 1 if run.unknown else 0
    if options.json:
        out.print_json(
            data={
                "schema": 1,
                "findings": run.findings,
                "written": written,
                "outdated": run.outdated(),
                "exit_code": code,
            }
        )
        return code
    for name in written:
        out.print(f"wrote compat_matrix/{name}; now run: python -m fsdp_sink_patches.matrix table", highlight=False)
    for id, versions in run.outdated().items():
        out.print(
            f"{id}: {len(versions)} releases are known only by symbols the patch no longer declares; refresh them: "
            f"{_registry.get(id).distribution} {', '.join(versions)}",
            highlight=False,
        )
    if run.unknown:
        releases = sorted({f"{f['distribution']}=={f['version']}" for f in run.unknown})
        out.print(
            f"not written: {len(run.unknown)} new source shapes in {', '.join(releases)}. Read what changed above; if "
            "the patch is still right for it (run tests/behaviour on that release), run this again with --accept.",
            highlight=False,
        )
    return code


def _print_finding(run: Refresh, finding: Mapping[str, Any], out: Console) -> None:
    head = f"{finding['distribution']} {finding['version']}  {finding['patch']}: "
    match finding["result"]:
        case "known":
            out.print(head + "known", markup=False, highlight=False)
        case "extended":
            out.print(head + f"same source as {finding['like']}, added", markup=False, highlight=False)
        case "outside":
            out.print(head + "outside the versions the patch is for", markup=False, highlight=False)
        case result:
            against = f"against {finding['against']}" if finding["against"] else "no release is known yet"
            verdict = "new source, accepted" if result == "accepted" else "NEW SOURCE"
            out.print(head + f"{verdict}; {against}:", markup=False, highlight=False)
            for change in finding["changed"]:
                known = change["known"] or "-"
                out.print(f"    {change['ref']}  {known} -> {change['found']}", markup=False, highlight=False)
                text = run.diff(finding, change["ref"])
                if text:
                    for line in text.rstrip().split("\n"):
                        style = "green" if line.startswith("+") else "red" if line.startswith("-") else None
                        out.print(f"        {line}", style=style, markup=False, highlight=False)
                elif text is None and finding["against"]:
                    out.print("        (no diff: that release's source is not here)", markup=False, highlight=False)


# --- tables --------------------------------------------------------------------------------------------------------


def span(distribution: str, versions: Sequence[str]) -> str:
    """``"transformers 4.57.0 to 5.24.0 (51 releases)"``; the releases between need not all be among ``versions``."""
    if len(versions) < 2:
        return f"{distribution} {versions[0]}" if versions else "none"
    ordered = sorted(versions, key=Version)
    return f"{distribution} {ordered[0]} to {ordered[-1]} ({len(ordered)} releases)"


def gpu_records(patch: Patch) -> list[tuple[Mapping[str, Any], Shape | None]]:
    """Each GPU record of a patch, oldest first, with the shape that it speaks for; None for a stale one."""
    shapes = _fingerprint.shapes(patch)
    try:
        records = _records.load(patch.id)
    except ValueError as error:  # a file that is no record; the message names it and says what to do
        raise MatrixError(str(error)) from error
    own = _records.sources(patch) if records else {}
    return [
        (record, next((s for s in shapes if _records.judge([record], s.digests, own).state == "validated"), None))
        for record in records
    ]


def matrix_text() -> str:
    """``compat_matrix/MATRIX.md``."""
    patches = _registry.patches()
    lines = [
        "# Compatibility matrix",
        "",
        "Written by `python -m fsdp_sink_patches.matrix table` from the TOML files and records beside it.",
        "",
        *patch_table(),
        "",
        "## Known sources",
        "",
        "Releases in one row have the same source wherever the patch touches or relies on it.",
    ]
    for id, patch in patches.items():
        needless = f", needless from {patch.fixed_in}" if patch.fixed_in else ""
        lines += [
            "",
            f"### {id}",
            "",
            f"{patch.gives}. {patch.distribution} `{patch.requires}`{needless}. Upstream: <{patch.link}>.",
            f"Remove when {patch.remove_when.rstrip('.')}.",
            *(f"Refuses `{releases}`: {why.rstrip('.')}." for releases, why in patch.refuses.items()),
            "",
            "| releases | changed against the row above |",
            "|---|---|",
        ]
        before: Mapping[str, str] = {}
        for shape in _fingerprint.shapes(patch):
            changed = [f"`{ref.partition(':')[2]}`" for ref, d in shape.digests.items() if before.get(ref, d) != d]
            lines.append(f"| {', '.join(shape.versions)} | {', '.join(changed) or '-'} |")
            before = shape.digests
    lines += ["", "## GPU records", "", "| patch | cell | GPU | validated for | date |", "|---|---|---|---|---|"]
    for id, patch in patches.items():
        for record, good in gpu_records(patch):
            where = f"{patch.distribution} {', '.join(good.versions)}" if good else "nothing: stale"
            gpu = _records.gpu_name(record)
            lines.append(f"| {id} | {record['cell']} | {gpu} | {where} | {record['date'][:10]} |")
    return "\n".join(lines) + "\n"


def patch_table() -> list[str]:
    """One row a patch, for MATRIX.md and README."""
    lines = ["| patch | what you get | releases known | GPU record |", "|---|---|---|---|"]
    for id, patch in _registry.patches().items():
        versions = [v for shape in _fingerprint.shapes(patch) for v in shape.versions]
        records = gpu_records(patch)
        gpu = "stale" if records else "never"
        for record, good in records:
            if good is not None:
                place = span(patch.distribution, good.versions)
                gpu = f"validated: {_records.gpu_name(record)}, {record['date'][:10]}, {place}"
        lines.append(f"| `{id}` | {patch.gives} | {span(patch.distribution, versions)} | {gpu} |")
    return lines


def readme_text(text: str) -> str:
    """README with the table between its markers made anew. Raises MatrixError without exactly one pair of markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in tail:
        raise MatrixError(f"README.md needs exactly one {BEGIN} followed by one {END}")
    return "\n".join([head + BEGIN, "", *patch_table(), "", END + tail])


def table(options: argparse.Namespace, out: Console) -> int:
    matrix = _fingerprint.matrix_directory() / "MATRIX.md"
    wanted = {matrix: matrix_text()}
    readme = matrix.parent.parent / "README.md"
    if readme.is_file():  # a wheel has none
        wanted[readme] = readme_text(readme.read_text(encoding="utf-8"))
    differing = [p for p, text in wanted.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    for path in differing:
        if options.check:
            old = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            for line in difflib.unified_diff(old, wanted[path].splitlines(), path.name, "generated", lineterm="", n=0):
                out.print(line, markup=False, highlight=False)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            out.print(f"wrote {path.name}", highlight=False)
    if options.check and differing:
        names = " and ".join(path.name for path in differing)
        out.print(f"{names} differ from the evidence; run: python -m fsdp_sink_patches.matrix table", highlight=False)
        return 1
    return 0


# --- command line --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fsdp_sink_patches.matrix",
        description="Digest upstream releases without installing them; write the tables.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "refresh",
        help="digest releases and extend compat_matrix/<upstream>.toml",
        description="Digest every symbol that a patch replaces or relies on, in each release. Exit 0: all known (new "
        "versions of known source are added); 1: new source, not written without --accept; 2: usage.",
    )
    one.add_argument(
        "requirement", nargs="+", help="transformers==5.24.0, 'flash-attn>=2.7.4.post1'; a bare name with --from"
    )
    one.add_argument(
        "--from", dest="from_directory", metavar="DIR", type=Path, help="wheels and sdists already downloaded"
    )
    one.add_argument("--accept", action="store_true", help="write new digests too: a person has read what changed")
    one.add_argument("--json", action="store_true", help="findings as JSON")
    one.set_defaults(action=refresh)
    two = commands.add_parser(
        "table",
        help="write MATRIX.md and the patch table in README.md",
        description="Write compat_matrix/MATRIX.md, and the table between the patch markers of README.md.",
    )
    two.add_argument("--check", action="store_true", help="write nothing; exit 1 if either differs")
    two.set_defaults(action=table)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    out = Console(soft_wrap=True)
    action: Callable[[argparse.Namespace, Console], int] = options.action
    try:
        return action(options, out)
    except MatrixError as error:
        print(f"matrix {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
