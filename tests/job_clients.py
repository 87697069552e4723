"""Stand-ins for beaker, sbatch, ray and sinfo: they note their arguments and answer as told.

clients = StandInClients(tmp_path / "clients", "sbatch")
monkeypatch.setenv("PATH", clients.path)            # nothing else is on it
clients.answer("sbatch", "sbatch: error: Invalid qos\\n", code=1)
clients.calls == [["sbatch", "--parsable", "job.sh"]]
"""

from __future__ import annotations

from pathlib import Path

# Only what sh has itself. The answers of beaker differ by its first word.
PROGRAM = """#!/bin/sh
key=${{0##*/}}
{{ printf '%s\\t' "$key" "$@"; echo; }} >> '{folder}/calls'
[ "$key" != beaker ] || key=beaker-$1
code=0
if [ -f '{folder}'/answers/$key ]; then
    {{ read -r code; while IFS= read -r line; do echo "$line"; done; }} < '{folder}'/answers/$key
fi
exit "$code"
"""
DATASET = "01HXYZABCDEFGHJKMNPQRSTVWX"
ANSWERS = {
    "sbatch": "4711\n",
    "ray": "Job 'weft-eval-tulu' submitted successfully\n",
    "beaker-dataset": f"Uploading tulu to {DATASET}\nDone.\n",
    "beaker-experiment": "Experiment 01EX submitted. See progress at https://beaker.org/ex/01EX\n",
    "sinfo": "gpu\ncpu\n",
}


class StandInClients:
    """Programs in a folder, which is all of `path`."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        (folder / "answers").mkdir(parents=True)
        (folder / "bin").mkdir()
        for name in names:
            program = folder / "bin" / name
            program.write_text(PROGRAM.format(folder=folder))
            program.chmod(0o755)
        for key, output in ANSWERS.items():
            self.answer(key, output)

    @property
    def path(self) -> str:
        return str(self.folder / "bin")

    def answer(self, key: str, output: str, code: int = 0) -> None:
        """Set the output and the exit code of a program, or of `beaker-dataset` and the like."""
        (self.folder / "answers" / key).write_text(f"{code}\n{output}")

    @property
    def calls(self) -> list[list[str]]:
        """The command lines so far."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split("\t")[:-1] for line in lines]
