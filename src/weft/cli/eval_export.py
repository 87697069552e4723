"""The conversion step of `weft eval submit --from-easylm`: a checkpoint of EasyLM becomes a model."""

from __future__ import annotations

import argparse
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from weft.cli import dialects
from weft.errors import ConfigError
from weft.launch.job_steps import StepRecord, describe_files
from weft.storage.buckets import is_remote

CONVERT = "convert"
MODEL_FOLDER = "model"
TOKENIZER = Path("tokenizer.model")


@dataclass(frozen=True)
class EasyLMExport:
    """Conversion of a checkpoint of EasyLM to the Hugging Face directory `output`."""

    checkpoint: str
    size: str
    update: str
    tokenizer: str
    output: Path

    def build_words(self) -> list[str]:
        """Return the words of the conversion after `weft easylm`."""
        return [
            "convert_easylm_to_hf",
            f"--load_checkpoint={self.checkpoint}",
            f"--tokenizer_path={self.tokenizer}",
            f"--model_size={self.size}",
            *([f"--update_llama_config={self.update}"] if self.update else []),
            f"--output_dir={self.output}",
        ]

    def check(self, record: StepRecord) -> None:
        """Raise `UserError` if the checkpoint cannot be converted, or `output` is not weft's."""
        easylm = dialects.load("easylm")
        easylm.check_export(self.checkpoint, self.size, self.update, self.tokenizer)
        if self.output.exists() and not (record.was_begun(CONVERT) or record.is_damaged):
            raise ConfigError(
                f"{self.output}: exists already, and was not made by this command; name another "
                f"folder by --output"
            )

    def is_finished(self, record: StepRecord, inputs: str) -> bool:
        """Return whether `output` is complete and made of these inputs."""
        step = record.find_finished(CONVERT, inputs)
        if step is None or not self.output.is_dir():
            return False
        return bool(step.get("files") == describe_files(self.output))

    def identify(self, *, copy: bool) -> str:
        """Return a name for the contents of the model.

        A checkpoint in a bucket has no name, "", unless `copy` allows to copy it to this machine.
        """
        if not copy and is_remote(self.checkpoint.rpartition("::")[2]):
            return ""
        easylm = dialects.load("easylm")
        words = (self.checkpoint, self.size, self.update, self.tokenizer)
        return str(easylm.identify_export(*words))

    def print_plan(self, record: StepRecord, inputs: str) -> None:
        """Print the conversion, or that it is finished."""
        if self.is_finished(record, inputs):
            print(f"{CONVERT}: finished, {self.output} is complete")
        else:
            print(f"$ {shlex.join(['weft', 'easylm', *self.build_words()])}")

    def run(self, record: StepRecord, inputs: str) -> None:
        """Convert the checkpoint, unless that was finished."""
        if self.is_finished(record, inputs):
            print(f"{CONVERT}: skipped, {self.output} is complete")
            return
        if record.was_begun(CONVERT):
            print(f"{CONVERT}: repeated, {self.output} is incomplete, changed or of another model")
        record.begin(CONVERT, inputs)
        # Remove the incomplete model, and what a killed conversion has left beside it.
        for old in (self.output, *self.output.parent.glob(f".{self.output.name}.*.tmp")):
            if old.is_dir():
                shutil.rmtree(old)
        print(f"$ {shlex.join(['weft', 'easylm', *self.build_words()])}", flush=True)
        dialects.load("easylm").main(self.build_words())
        record.finish(CONVERT, files=describe_files(self.output))


def build_export(given: argparse.Namespace, folder: Path) -> EasyLMExport | None:
    """Return the conversion that the command line asks for, or None.

    Raises `ConfigError` for options of a conversion without one, and for missing ones.
    """
    if given.from_easylm is None:
        for option in ("model_size", "update_llama_config", "tokenizer_path"):
            if getattr(given, option) is not None:
                raise ConfigError(f"--{option}: belongs to --from-easylm PATH; add it")
        return None
    if given.location is not None:
        raise ConfigError(
            "--location and --from-easylm exclude each other: name a model, or a checkpoint of "
            "EasyLM to convert"
        )
    if not given.model_size:
        raise ConfigError("--model_size is missing: --from-easylm needs it, such as 7b")
    tokenizer = given.tokenizer_path
    if tokenizer is None:
        if not TOKENIZER.is_file():
            raise ConfigError(
                f"--tokenizer_path is missing, and this folder has no {TOKENIZER}; copy the "
                f"checkpoint's tokenizer here, or name it"
            )
        tokenizer = str(TOKENIZER)
    return EasyLMExport(
        checkpoint=given.from_easylm,
        size=given.model_size,
        update=given.update_llama_config or "",
        tokenizer=tokenizer,
        output=folder / MODEL_FOLDER / given.model_name,  # results are named after it
    )
