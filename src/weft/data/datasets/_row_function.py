"""Dataset types that convert each row with a user's function.

The decorator `register_dataset(name, rows="prompt_answer")` makes a dataset type from the function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.datasets.base import DatasetUtility, TableDataset, split_options
from weft.data.lengths import EncodedSample
from weft.data.rows import BadRow, Row
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import RowEncoder, tokenize
from weft.errors import ConfigError
from weft.registry import datasets, import_user_code


@dataclass(frozen=True)
class RowFunctionEncoder:
    """Row encoder that converts rows with a user's function before encoding them.

    Attributes:
        rows: built-in dataset type of the converted rows
        inner: row encoder of this dataset type
        module: name of the module that defines the function
        file: path of the file that defines the function
        name: name of the function
        source: SHA-256 hash of the file, for the cache key
        options: keyword arguments of the function
    """

    rows: str
    inner: Any
    module: str
    file: str
    name: str
    source: str
    options: Mapping[str, Any]

    @property
    def id_key(self) -> str:
        return str(self.inner.id_key)

    def check(self, tokenizer: Tokenizer) -> None:
        self.inner.check(tokenizer)

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        try:
            result = self.load_function()(row, **self.options)
        except KeyError as error:
            raise BadRow(f"lacks the key {error.args[0]!r}, which {self.name} reads") from error
        if not isinstance(result, Mapping):
            raise BadRow(
                f"{self.name} returned a {type(result).__name__}; it must return a row of type "
                f"{self.rows}"
            )
        return list(self.inner.encode(result, tokenizer))

    def load_function(self) -> Callable[..., Any]:
        """Return the user's function.

        Imports the module that defines it if this process has not imported the module yet.
        """
        module = sys.modules.get(self.module)
        # In a tokenizing process, `__main__` is another module: import the user's file by its path.
        if module is None or self.name not in vars(module):
            if self.module == "__main__" or importlib.util.find_spec(self.module) is None:
                import_user_code([self.file])
                module = sys.modules[Path(self.file).stem]
            else:
                module = importlib.import_module(self.module)
        function: Callable[..., Any] = vars(module)[self.name]
        return function


class RowDataset:
    """Dataset of rows that are read from files and converted by a user's function."""

    def __init__(
        self, form: RowEncoder, lengths: Any, util: DatasetUtility, path: str, split: str | None
    ) -> None:
        self.form = type(form)
        self.table = tokenize(form, lengths, util.tokenizer, util.build_source(path, split))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> SequenceSample:
        return self.table[index]


def make_dataset_class(
    function: Callable[..., Any], name: str, *, rows: str
) -> Callable[..., RowDataset]:
    """Return a constructor of datasets that convert each row with `function`.

    `rows` is the built-in dataset type of the converted rows. `function` is called as
    `function(row, option=..)` and returns a row of that type. Limits, masks, reports, cache and
    mixtures work as for the built-in type.
    """
    shipped = datasets.get(rows)
    if not (inspect.isclass(shipped) and issubclass(shipped, TableDataset)):
        raise ConfigError(
            f"dataset type {name!r}: rows={rows!r} is not a type that reads rows; use a shipped one"
        )
    # The tokenizing processes import the function by its module or file.
    file = inspect.getsourcefile(function)
    if file is None or not function.__qualname__.isidentifier():
        raise ConfigError(
            f"dataset type {name!r}: define {function.__qualname__} at the top of a module or file"
        )
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    function_parameters = list(inspect.signature(function).parameters)[1:]

    def build(
        util: DatasetUtility, path: str, split: str | None = None, **options: Any
    ) -> RowDataset:
        row_options = {}
        for key, value in options.items():
            if value is not None or key not in shipped.default_options:
                row_options[key] = value
        # Separate the options of the function from the options of the row encoder.
        function_options = {}
        for key in function_parameters:
            if key in row_options:
                function_options[key] = row_options.pop(key)
        inner, lengths = split_options(shipped.form, {**shipped.default_options, **row_options})
        location = function.__module__, str(Path(file).resolve()), function.__qualname__
        return RowDataset(
            RowFunctionEncoder(rows, inner, *location, digest, function_options),
            lengths,
            util,
            path,
            split,
        )

    build.__module__ = function.__module__
    build.__qualname__ = function.__qualname__
    build.__name__ = function.__name__
    return build
