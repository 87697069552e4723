"""A stand-in for gcloud: it notes its arguments, fails as it is told, and runs ssh commands here.

    pod = StandInPod(tmp_path, hosts=2)
    monkeypatch.setenv("PATH", pod.path)
    pod.plan("create", code=1, error=STOCKOUT)   # the next `create` fails, later ones succeed

`ssh` runs its command in `sh` once for each worker, in a folder of its own as home directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys
folder, verb, rest = sys.argv[1], sys.argv[5], sys.argv[6:]
with open(f"{folder}/calls.jsonl", "a") as calls:
    calls.write(json.dumps(sys.argv[2:]) + "\\n")
with open(f"{folder}/plan.json") as file:
    plan = json.load(file)
flags = dict(word[2:].split("=", 1) for word in rest if word.startswith("--") and "=" in word)
answer = plan.get(verb) and plan[verb].pop(0)
with open(f"{folder}/plan.json", "w") as file:
    json.dump(plan, file)
if answer:
    sys.stdout.write(answer["output"])
    sys.stderr.write(answer["error"])
    if answer["only"]:
        sys.exit(answer["code"])
hosts = sorted(os.listdir(f"{folder}/hosts"), key=int)
if verb == "describe":
    node = {"state": "READY", "acceleratorType": "v4-32", "networkEndpoints": [{} for _ in hosts]}
    print(json.dumps(node))
elif verb in ("ssh", "scp"):
    worker = flags.get("worker", "0")
    lost = plan.get("lost workers", [])
    for host in hosts if worker == "all" else [worker]:
        home = f"{folder}/hosts/{host}"
        if host in lost:
            print(f"##### Command execution on worker {host} failed with exit status 255. "
                  "Continuing.", file=sys.stderr)
        elif verb == "scp":
            source, target = [word for word in rest if not word.startswith("--")]
            with open(source, "rb") as file, open(f"{home}/{target.split(':')[1]}", "wb") as copy:
                copy.write(file.read())
        else:
            # As gcloud and ssh do: split at blanks, then joined by blanks for the host's shell.
            text = " ".join(flags["command"].split(" "))
            environment = {**os.environ, "HOME": home, "TPU_WORKER_ID": host, "TMPDIR": home}
            code = subprocess.call(["sh", "-c", text], cwd=home, env=environment)
            if code:
                print(f"##### Command execution on worker {host} failed with exit status {code}. "
                      "Continuing.", file=sys.stderr)
"""

STOCKOUT = (
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8,\n  "message": "There is no more '
    'capacity in the zone \\"us-central2-b\\"; you can try in another zone [EID: 0x1]"\n}\n'
)
QUOTA = (
    'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8,\n  "message": "Quota limit '
    "'TPUV4sPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-central2-b.\"\n}\n"
)


class StandInPod:
    """A folder with `bin/gcloud`, and a home directory for each host with weft's Python in it."""

    def __init__(self, folder: Path, hosts: int = 2) -> None:
        self.folder = folder
        self.path = f"{folder}/bin:/usr/bin:/bin"
        (folder / "bin").mkdir()
        (folder / "plan.json").write_text("{}")
        (folder / "calls.jsonl").touch()
        (folder / "program.py").write_text(PROGRAM)
        self.write_program(
            folder / "bin" / "gcloud",
            f'exec {sys.executable} -IS {folder}/program.py {folder} "$@"',
        )
        for number in range(hosts):
            self.write_program(self.python(number), f'exec {sys.executable} "$@"')

    def write_program(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def home(self, number: int) -> Path:
        return self.folder / "hosts" / str(number)

    def python(self, number: int) -> Path:
        return self.home(number) / "weft-tpu" / "venv" / "bin" / "python"

    def plan(
        self, verb: str, *, code: int = 0, output: str = "", error: str = "", only: bool = True
    ) -> None:
        """Set the next answer to a verb; with `only`, that is all the command does."""
        plans = json.loads((self.folder / "plan.json").read_text())
        answer = {"code": code, "output": output, "error": error, "only": only}
        plans.setdefault(verb, []).append(answer)
        (self.folder / "plan.json").write_text(json.dumps(plans))

    def lose(self, *workers: int) -> None:
        """Let ssh and scp fail for these workers, with gcloud's exit code 0."""
        plans = json.loads((self.folder / "plan.json").read_text())
        plans["lost workers"] = [str(worker) for worker in workers]
        (self.folder / "plan.json").write_text(json.dumps(plans))

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call, after `gcloud`."""
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    @property
    def verbs(self) -> list[str]:
        return [call[3] for call in self.calls]
