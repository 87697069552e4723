"""Runs the tests against deliberate bugs, to see that tests catch them.

    python tools/deliberate_bugs.py --output before.md                   # all patches of tools/deliberate_bugs
    python tools/deliberate_bugs.py --output before.md 07 whitening      # those whose names contain one of these words

Each patch breaks one thing in `src/`. Its header says what is wrong and which tests to run. The
tool applies the patch to a copy of the last commit, runs these tests, and writes the failing ones
into a Markdown table. Its exit code is 1 where a patch does not apply, where no test catches it, or
where tests fail without any patch.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "tools" / "deliberate_bugs"
MARKERS = {"default": ["-m", "not slow"], "slow": ["-m", "slow"], "both": []}
HEAD = "| patch | what is wrong | tests that fail | which |\n|---|---|---|---|\n"
ROW = re.compile(r"\| `(?P<name>[^`]+)` \|.*\|")
FAILURE = re.compile(r"^(?:FAILED|ERROR) (?P<test>tests/.+?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5  # pytest's exit code where nothing was collected


@dataclass(frozen=True)
class Patch:
    """A bug and its header: what is wrong, the test files or folders to run, the tier of tests
    (`MARKERS`).
    """

    path: Path
    what: str
    tests: tuple[str, ...]
    tier: str

    @property
    def name(self) -> str:
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Raises `ValueError` for a header that lacks a line."""
        header = path.read_text().partition("diff --git")[0].splitlines()
        values = dict(
            line.split(": ", 1) for line in header if line.startswith(("tests: ", "tier: "))
        )
        if not header or set(values) != {"tests", "tier"} or values["tier"] not in MARKERS:
            raise ValueError(
                f"{path.name}: the header needs a sentence, a line `tests: PATHS` and a line "
                f"`tier: TIER`"
            )
        return cls(path, header[0], tuple(values["tests"].split()), values["tier"])


@dataclass(frozen=True)
class Outcome:
    """The failing tests of a run; `trouble` says why a run says nothing."""

    failed: tuple[str, ...] = ()
    trouble: str | None = None

    def without(self, known: Iterable[str]) -> Outcome:
        """Leave out tests that fail without the patch too."""
        return Outcome(tuple(test for test in self.failed if test not in set(known)), self.trouble)

    @property
    def functions(self) -> Counter[str]:
        """Test function -> number of its failing cases."""
        return Counter(test.partition("[")[0] for test in self.failed)

    def row(self, patch: Patch) -> str:
        """One line of the table."""
        cases = [
            f"`{test}`" + (f" ({count} cases)" if count > 1 else "")
            for test, count in self.functions.items()
        ]
        which = (
            f"**{self.trouble}**"
            if self.trouble
            else "<br>".join(cases) or "**no test catches it**"
        )
        return f"| `{patch.name}` | {patch.what} | {len(self.functions)} | {which} |"


@contextmanager
def copied_tree(patch: Path | None = None) -> Iterator[Path]:
    """A copy of the last commit in a temporary folder, with a patch applied to it."""
    with tempfile.TemporaryDirectory(prefix="deliberate-bug-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x"], cwd=tree, check=True, input=archive)
        if patch is not None:
            # Within another checkout `git apply` would pass over these files without a word.
            apart = os.environ | {"GIT_CEILING_DIRECTORIES": folder}
            subprocess.run(
                ["git", "apply", str(patch)], cwd=tree, check=True, env=apart, capture_output=True
            )
        yield tree


def run_tests(tree: Path, tests: Sequence[str], tier: str, seconds: float) -> Outcome:
    """Run tests in a copy of the tree, with this interpreter."""
    missing = [test for test in tests if not (tree / test.partition("::")[0]).exists()]
    if missing:
        return Outcome(trouble=f"no such tests: {', '.join(missing)}")
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    data = {"WEFT_TEST_DATA": str(ROOT.parent / "shared" / "data")}
    environment = (
        defaults
        | data
        | os.environ
        | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *MARKERS[tier],
        *tests,
    ]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome(trouble=f"the tests did not end within {seconds:g} s")
    failed = tuple(found["test"] for found in FAILURE.finditer(said))
    if process.returncode == NO_TESTS or (process.returncode and not failed):
        return Outcome(
            trouble=f"pytest ended with {process.returncode}: {said.strip().splitlines()[-1]}"
        )
    return Outcome(failed)


def try_patch(patch: Patch, seconds: float) -> Outcome:
    """Apply a patch to a copy of the tree and run its tests there."""
    try:
        with copied_tree(patch.path) as tree:
            return run_tests(tree, patch.tests, patch.tier, seconds)
    except subprocess.CalledProcessError as error:
        return Outcome(trouble=f"does not apply: {error.stderr.decode().strip().splitlines()[0]}")


def run_clean(patches: Sequence[Patch], seconds: float) -> Outcome:
    """Run the tests of all patches on a copy without any, once for each tier."""
    failed: list[str] = []
    with copied_tree() as tree:
        for tier in MARKERS:
            tests = sorted(
                {test for patch in patches if patch.tier == tier for test in patch.tests}
            )
            # pytest runs a file twice that is named beside its folder.
            apart = [
                test for test in tests if not any(test.startswith(f"{other}/") for other in tests)
            ]
            found = run_tests(tree, apart, tier, seconds * len(patches)) if apart else Outcome()
            if found.trouble:
                return found
            failed += found.failed
    return Outcome(tuple(failed))


def update_table(output: Path, patch: Patch, outcome: Outcome) -> None:
    """Put the row of a patch into the table; rows of other patches stay."""
    lines = output.read_text().splitlines() if output.exists() else []
    rows = {found["name"]: line for line in lines if (found := ROW.fullmatch(line))}
    rows[patch.name] = outcome.row(patch)
    there = sorted(path.stem for path in PATCHES.glob("*.patch"))
    output.write_text(HEAD + "".join(f"{rows[name]}\n" for name in there if name in rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="patches whose names contain one of these; all where none is given"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="Markdown file for the table; its other rows stay",
    )
    parser.add_argument("--jobs", type=int, default=1, help="patches at a time")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds that the tests of a patch may take"
    )
    parser.add_argument(
        "--skip-clean", action="store_true", help="do not run the tests without a patch first"
    )
    given = parser.parse_args()

    patches = [Patch.read(path) for path in sorted(PATCHES.glob("*.patch"))]
    patches = [p for p in patches if not given.words or any(word in p.name for word in given.words)]
    clean = Outcome() if given.skip_clean else run_clean(patches, given.timeout)
    good = not clean.failed and not clean.trouble
    if not good:
        print("without a patch:", clean.trouble or ", ".join(clean.failed), file=sys.stderr)

    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(try_patch, patch, given.timeout): patch for patch in patches}
        for done in as_completed(running):
            patch, outcome = running[done], done.result().without(clean.failed)
            update_table(given.output, patch, outcome)
            caught = bool(outcome.failed) and outcome.trouble is None
            good = good and caught
            print(
                f"{patch.name}: {outcome.trouble or f'{len(outcome.functions)} tests fail'}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
