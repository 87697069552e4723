"""`weft chat MODEL_DIR`: a conversation in the terminal with a model directory, or with the newest checkpoint of a run."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.conversation import Chat
from weft.data.spec import TokenizerSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import CheckpointError
from weft.options import validate

if TYPE_CHECKING:
    from weft.cli.chat_view import View
    from weft.engine.base import Engine

ROLES = ("actor", "model")  # whose checkpoint of a run is talked to: the first of these that it saved
STEP = re.compile(r"step(\d+)")
ADAPTER = "adapter_config.json"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="weft chat", description=__doc__)
    made.add_argument(
        "model", metavar="MODEL_DIR", help="model directory, adapter directory, run directory or hub name"
    )
    made.add_argument("--system", metavar="TEXT", help="system prompt")
    made.add_argument(
        "--temperature", type=float, default=1.0, help="logits are divided by it (default 1); 0 is greedy"
    )
    made.add_argument("--top-p", type=float, default=1.0, help="likeliest tokens of this probability (default 1: all)")
    made.add_argument("--top-k", type=int, default=0, help="this many likeliest tokens (default 0: all)")
    made.add_argument("--max-new-tokens", type=int, default=512, help="most tokens of an answer (default 512)")
    made.add_argument("--seed", type=int, help="seed of the draws (default: another one each time)")
    made.add_argument("--plain", action="store_true", help="continue text as it stands, without the chat template")
    made.add_argument("--backend", default="torch", help="torch (default) or hf")
    made.add_argument("--device", help="cpu, cuda, ... (default: the best there is)")
    made.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: on a GPU the checkpoint's own, else float32)"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Parse, load, converse. Raises `UserError` (exit code 2) for a model or an option that cannot be used."""
    given = parser().parse_args(list(argv))
    spec = _generation_spec(given)
    path, note = locate(given.model)
    model = ModelSpec(path=path, backend=given.backend, device=given.device, dtype=given.dtype)
    validate(model)

    from weft.cli.chat_view import View

    view = View()
    if note:
        view.note(note)
    chat = _load(model, spec, view, plain=given.plain)
    chat.system = given.system
    chat.converse()
    return 0


def locate(given: str) -> tuple[str, str]:
    """(model path or hub name, what to tell the user). A run stands for its newest checkpoint. Raises `CheckpointError`."""
    folder = Path(given).expanduser()
    if not folder.exists():
        if folder.is_absolute() or given.startswith((".", "~")) or given.count("/") != 1:
            raise CheckpointError(f"{given}: no such directory; name a model directory, or a run such as runs/E/T")
        return given, ""
    if folder.is_dir() and ((folder / "config.json").exists() or (folder / ADAPTER).exists()):
        return str(folder), ""
    parents = [folder / "checkpoints" / role for role in ROLES] + [folder / role for role in ROLES] + [folder]
    for parent in parents:
        steps = [(int(match[1]), path) for path in parent.glob("step*") if (match := STEP.fullmatch(path.name))]
        if steps:
            newest = max(steps)[1]
            return str(newest), f"newest checkpoint: {newest}"
    raise CheckpointError(
        f"{given} holds neither a model (config.json) nor checkpoints of {' or '.join(ROLES)}; "
        "a run that saved none needs save_freq_steps or save_freq_epochs"
    )


def _generation_spec(given: argparse.Namespace) -> GenerationSpec:
    greedy = given.temperature == 0
    spec = GenerationSpec(
        max_new_tokens=given.max_new_tokens,
        temperature=1.0 if greedy else given.temperature,
        greedy=greedy,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=int.from_bytes(os.urandom(4), "little") if given.seed is None else given.seed,
    )
    validate(spec)
    return spec


def _load(model: ModelSpec, spec: GenerationSpec, view: View, *, plain: bool) -> Chat:
    """The model with its tokenizer, and the lines at the top. Raises `UserError` for what cannot be talked to."""
    _check_talks(str(model.path))
    from weft.data.tokenizer import Tokenizer
    from weft.registry import backends
    from weft.topology import Layout

    adapter = Path(str(model.path)) if (Path(str(model.path)) / ADAPTER).exists() else None
    if adapter:
        model = base_of(adapter, model)
    tokenizer = Tokenizer.load(model.tokenizer, model.path)
    engine = backends.get(model.backend)(model, Layout())
    if adapter:
        add_adapter(engine, adapter, str(model.path))
    facts = engine.description
    chat = Chat(engine, tokenizer, replace(spec, stop_ids=tokenizer.stop_ids()), view)
    chat.plain = plain or tokenizer.chat_template is None
    view.title(f"weft chat  {adapter or model.path}")
    if adapter:
        view.note(f"adapter of {model.path}")
    device = facts.get("device", model.device or "")
    view.note(
        f"{facts['family']}, {_amount(facts['num_parameters'])} parameters, {facts.get('dtype', '')} {device}".rstrip()
    )
    view.note(chat.settings())
    if chat.plain:
        why = "--plain" if plain else "this tokenizer has no chat template, so the model is no chat model"
        view.note(f"plain text: every line is continued by itself, as it stands ({why})")
    if tokenizer.eos_id is None:
        view.note("the tokenizer has no end-of-sequence token: answers end at max_new_tokens")
    view.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    return chat


def _check_talks(path: str) -> None:
    """Raises `CheckpointError` for a model with a score head: it has no words."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return
    try:
        kinds = json.loads(config.read_text()).get("architectures") or []
    except ValueError as error:
        raise CheckpointError(f"{config} is no JSON: {error}") from error
    if any("ForSequenceClassification" in kind or "ForTokenClassification" in kind for kind in kinds):
        raise CheckpointError(
            f"{path} is a reward or value model ({kinds[0]}): it gives scores, not text; name an actor"
        )


def base_of(adapter: Path, model: ModelSpec) -> ModelSpec:
    """The model that an adapter belongs to, with the adapter's tokenizer where it has one. Raises `CheckpointError`."""
    from weft.checkpoints.peft_io import read_adapter_config

    settings = read_adapter_config(adapter)
    if settings["task_type"] != "CAUSAL_LM":
        raise CheckpointError(f"{adapter} is the adapter of a reward or value model: it gives scores, not text")
    base = settings.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"{adapter / ADAPTER} does not name its base model; merge it with weft convert merge --base"
        )
    own = TokenizerSpec(path=str(adapter)) if (adapter / "tokenizer_config.json").exists() else model.tokenizer
    return replace(model, path=str(base), tokenizer=own)


def add_adapter(engine: Engine, adapter: Path, base: str) -> None:
    """Add what the adapter changes to the engine's weights."""
    from weft.checkpoints import hf_io, peft_io
    from weft.models.network import lora
    from weft.models.network.parameters import values
    from weft.topology import whole

    network = hf_io.load(base, "lm")
    peft_io.load_adapter(adapter, network)
    scales = lora.scales(network)
    merged = lora.merge(values(network), scales)
    changed = ((name, merged[name]) for name in (f"{layer}.weight" for layer in scales))
    engine.write(((name, whole(tuple(value.shape)), value) for name, value in changed), version=0)


def _amount(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
