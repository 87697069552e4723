"""Conversion of an EasyLM checkpoint to a model, for `weft eval submit --from-easylm`."""

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
    """Conversion of an EasyLM checkpoint to the Hugging Face directory `output`.

    `size` is EasyLM's name of the model size, and `update` is a dictionary, as text, with changes
    of that size. `tokenizer` is the path of the tokenizer.
    """

    checkpoint: str
    size: str
    update: str
    tokenizer: str
    output: Path

    def build_words(self) -> list[str]:
        """Return the arguments of `weft easylm` that run the conversion."""
        return [
            "convert_easylm_to_hf",
            f"--load_checkpoint={self.checkpoint}",
            f"--tokenizer_path={self.tokenizer}",
            f"--model_size={self.size}",
            *([f"--update_llama_config={self.update}"] if self.update else []),
            f"--output_dir={self.output}",
        ]

    def check(self, record: StepRecord) -> None:
        """Raise `UserError` if the checkpoint cannot be converted, or `output` is not weft's own.

        `record` lists the steps of this job that were begun and finished.
        """
        easylm = dialects.load("easylm")
        easylm.check_export(self.checkpoint, self.size, self.update, self.tokenizer)
        if self.output.exists() and not (record.was_begun(CONVERT) or record.is_damaged):
            raise ConfigError(
                f"{self.output}: exists already, and was not made by this command; name another "
                f"folder by --output"
            )

    def is_finished(self, record: StepRecord, inputs: str) -> bool:
        """Return whether `output` is complete and was made from the inputs with the id `inputs`."""
        step = record.find_finished(CONVERT, inputs)
        if step is None or not self.output.is_dir():
            return False
        return bool(step.get("files") == describe_files(self.output))

    def identify(self, *, copy: bool) -> str:
        """Return a text that identifies the contents of the model.

        For a checkpoint in a bucket, the text is "" unless `copy` allows copying the checkpoint to
        this machine.
        """
        if not copy and is_remote(self.checkpoint.rpartition("::")[2]):
            return ""
        easylm = dialects.load("easylm")
        words = (self.checkpoint, self.size, self.update, self.tokenizer)
        return str(easylm.identify_export(*words))

    def print_plan(self, record: StepRecord, inputs: str) -> None:
        """Print the command of the conversion, or that the conversion is finished."""
        if self.is_finished(record, inputs):
            print(f"{CONVERT}: finished, {self.output} is complete")
        else:
            print(f"$ {shlex.join(['weft', 'easylm', *self.build_words()])}")

    def run(self, record: StepRecord, inputs: str) -> None:
        """Convert the checkpoint, unless the conversion is finished."""
        if self.is_finished(record, inputs):
            print(f"{CONVERT}: skipped, {self.output} is complete")
            return
        if record.was_begun(CONVERT):
            print(f"{CONVERT}: repeated, {self.output} is incomplete, changed or of another model")
        record.begin(CONVERT, inputs)
        # Remove the incomplete model, and temporary folders of a killed conversion.
        for leftover in (self.output, *self.output.parent.glob(f".{self.output.name}.*.tmp")):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        print(f"$ {shlex.join(['weft', 'easylm', *self.build_words()])}", flush=True)
        dialects.load("easylm").main(self.build_words())
        record.finish(CONVERT, files=describe_files(self.output))


def build_export(arguments: argparse.Namespace, folder: Path) -> EasyLMExport | None:
    """Return the conversion that the command line asks for, or None without `--from-easylm`.

    `folder` is the folder of the job. Raises `ConfigError` for options that need `--from-easylm`,
    and for missing options of a conversion.
    """
    if arguments.from_easylm is None:
        for option in ("model_size", "update_llama_config", "tokenizer_path"):
            if getattr(arguments, option) is not None:
                raise ConfigError(f"--{option}: belongs to --from-easylm PATH; add it")
        return None
    if arguments.location is not None:
        raise ConfigError(
            "--location and --from-easylm exclude each other: name a model, or a checkpoint of "
            "EasyLM to convert"
        )
    if not arguments.model_size:
        raise ConfigError("--model_size is missing: --from-easylm needs it, such as 7b")
    tokenizer = arguments.tokenizer_path
    if tokenizer is None:
        if not TOKENIZER.is_file():
            raise ConfigError(
                f"--tokenizer_path is missing, and this folder has no {TOKENIZER}; copy the "
                f"checkpoint's tokenizer here, or name it"
            )
        tokenizer = str(TOKENIZER)
    return EasyLMExport(
        checkpoint=arguments.from_easylm,
        size=arguments.model_size,
        update=arguments.update_llama_config or "",
        tokenizer=tokenizer,
        output=folder / MODEL_FOLDER / arguments.model_name,  # results are named after it
    )
