"""Reading of training data: from `dataset.*` options to batches, with mixing, splits and counts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from weft.data import features
from weft.data.background_table import BackgroundTokenTable
from weft.data.batches import BatchingOptions, BatchLoader, MapLoader, SourceSubset, StreamLoader
from weft.data.columns import check_names
from weft.data.counts import SourceCount, render_table
from weft.data.datasets.base import (
    DatasetUtility,
    MapDataset,
    StreamDataset,
    TokenizedDataset,
    is_by_index,
)
from weft.data.mixture import SourceShare, count_per_epoch, hold_out, make_generator
from weft.data.named.prepare import ValidationSplit, find_cache_root, find_mode, prepare
from weft.data.rows import TREE_TYPES, is_tree
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.data.spec import DatasetSpec, SourceSpec, list_source_specs
from weft.data.table import TokenizationReport
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import Reporter, show_progress, skip_progress
from weft.errors import ConfigError, DataError
from weft.registry import datasets

# options that are passed to a dataset class only if they are set
OMITTED_IF_UNSET = ("path", "overlong")


@dataclass(frozen=True)
class LoadedData:
    """Data of a run, as loaded by `load_data`.

    Attributes:
        train: loader of the training batches
        valid: validation samples by source name
        counts: statistics of each source, such as its number of samples
        notes: messages for the user, for example about truncated rows
        max_seqlen: maximum number of tokens of a prompt together with one of its completions, or 0
            if no source is tokenized by weft
        parts: training samples of each source
        background_tables: tables whose rows are tokenized during training, until `close` is called
        pending_notes: sources that `take_new_notes` has not reported yet, each with its statistics
            and a description of the length limits
    """

    train: BatchLoader
    valid: Mapping[str, SourceSubset] = field(default_factory=dict)
    counts: tuple[SourceCount, ...] = ()
    notes: tuple[str, ...] = ()
    max_seqlen: int = 0
    parts: tuple[SourceSubset, ...] = ()
    background_tables: tuple[BackgroundTokenTable, ...] = ()
    pending_notes: list[tuple[SourceCount, str]] = field(default_factory=list)

    def check_max_seqlen(self, check: Callable[[int], None]) -> None:
        """Call `check` with the maximum sequence length, and again each time this maximum grows.

        It can grow while samples are tokenized during training. Lengths are in tokens.
        """
        check(self.max_seqlen)
        for table in self.background_tables:
            table.check_longest = check

    def take_new_notes(self) -> list[str]:
        """Return notes on the sources whose tokenization has finished since the last call."""
        lines: list[str] = []
        for pending_note in list(self.pending_notes):
            count, limits = pending_note
            if count.ahead is not None and (report := count.ahead.build_report()) is not None:
                self.pending_notes.remove(pending_note)
                lines.append(f"{count.label}: all {len(count.ahead):,} samples are tokenized")
                lines += replace(count, report=report, ahead=None).build_notes(limits)
        return lines

    def close(self) -> None:
        """Stop the worker processes that tokenize rows."""
        for table in self.background_tables:
            table.close()

    def format_counts(self) -> str:
        """Format the statistics of all sources as a plain-text table."""
        return render_table(self.counts)


@dataclass(frozen=True)
class SourceData:
    """Training and validation samples of one data source.

    Attributes:
        share: number of training samples, and how many of them each epoch uses
        train: training samples; a `StreamDataset` yields whole batches
        counts: sample counts of the source, followed by those of its validation file if it has one
        valid: validation samples, or None if the source has none
    """

    share: SourceShare
    train: SourceSubset | StreamDataset
    counts: tuple[SourceCount, ...]
    valid: SourceSubset | None = None


def load_data(
    spec: DatasetSpec,
    dataset_type: str,
    tokenizer: Tokenizer,
    *,
    seed: int,
    progress: Reporter | bool | None = None,
    max_samples: int | None = None,
    ahead: bool = False,
) -> LoadedData:
    """Read, tokenize and mix the training and validation rows of a run.

    `dataset_type` is the experiment's default type. It is used unless `dataset.type` or a source's
    `type` is set, or a file contains Open-Assistant trees. If `progress` is False, no progress is
    shown. `max_samples` limits the number of samples read from each source. `ahead` allows large
    files to be tokenized during training. Raises `ConfigError` for options that contradict each
    other or the dataset type, and `DataError` with a report on every invalid row.
    """
    if progress is None or progress is True:
        reporter: Reporter = show_progress
    elif progress is False:
        reporter = skip_progress
    else:
        reporter = progress
    tokenizer = features.with_additions(spec, tokenizer)
    # Batches by length or by tokens need all lengths, so all rows are tokenized before training.
    util = DatasetUtility(
        tokenizer,
        seed,
        0,
        1,
        spec.cache_dir,
        spec.num_workers,
        reporter,
        random_window=spec.random_window,
        max_samples=max_samples,
        ahead=ahead
        and not (spec.train_tokens_per_batch or spec.sort_by_length or spec.sample_mixing),
    )
    # Read the sources, with validation samples split off.
    reader = SourceReader(spec, spec.type or dataset_type, util)
    named, named_notes = reader.prepare_named(assign_unique_names(resolve_sources(spec)))
    built = [reader.read_source(source, name, several=len(named) > 1) for source, name in named]
    valid = {data.valid.name: data.valid for data in built if data.valid is not None}
    per_epoch = count_per_epoch([data.share for data in built])
    counts = [
        replace(count, per_epoch=number if count.train else 0)
        for data, number in zip(built, per_epoch, strict=True)
        for count in data.counts
    ]
    if spec.valid_path is not None:
        part, count = reader.read_validation(
            SourceSpec(spec.valid_path, args=spec.args, columns=spec.columns),
            _derive_name(spec.valid_path),
        )
        valid[part.name] = part
        counts.append(count)
    # Collect notes and lengths, build the loader, and start tokenizing in the background.
    notes = [
        *named_notes,
        *(note for count in counts for note in count.build_notes(reader.describe_limits(count))),
    ]
    parts = tuple(data.train for data in built if isinstance(data.train, SourceSubset))
    read = [*parts, *valid.values()]
    longest = [
        part.dataset.table.compute_max_seqlen()
        for part in read
        if isinstance(part.dataset, TokenizedDataset)
    ]
    tables = tuple(part.background_table for part in read if part.background_table is not None)
    tables = tuple({id(table): table for table in tables}.values())
    loader = _build_loader(spec, built, seed)
    for table in tables:
        table.start(_count_processes(spec.num_workers, len(tables)))
    pending = [
        (count, reader.describe_limits(count)) for count in counts if count.ahead is not None
    ]
    return LoadedData(
        loader, valid, tuple(counts), tuple(notes), max(longest, default=0), parts, tables, pending
    )


def _count_processes(num_workers: int | None, tables: int) -> int:
    """Return the number of processes that tokenize each source during training.

    The available processes are divided evenly among `tables`, the number of sources tokenized in
    the background. The option `dataset.num_workers` sets how many processes are available. If it is
    None, all cores except one are used, since training needs one.
    """
    return max(1, ((os.cpu_count() or 1) - 1 if num_workers is None else num_workers) // tables)


def _build_loader(spec: DatasetSpec, built: list[SourceData], seed: int) -> BatchLoader:
    streams = []
    for data in built:
        if not isinstance(data.train, SourceSubset):
            streams.append(data)
    if not streams:
        parts = []
        for data in built:
            if isinstance(data.train, SourceSubset):
                parts.append(data.train)
        return MapLoader(
            parts,
            [data.share for data in built],
            _build_batching(spec),
            seed=seed,
            shuffle=spec.shuffle,
        )
    if len(built) > 1:
        raise ConfigError(
            f"dataset.sources: {streams[0].share.name} is iterable: it makes its own batches "
            f"and cannot be mixed with others"
        )
    dataset = streams[0].train
    assert not isinstance(dataset, SourceSubset)
    return StreamLoader(dataset, streams[0].share.name)


def _build_batching(spec: DatasetSpec) -> BatchingOptions:
    sizes = (spec.train_bs_n_seqs, spec.train_tokens_per_batch)
    if sizes.count(None) != 1:
        raise ConfigError(
            f"dataset.train_bs_n_seqs={sizes[0]} and dataset.train_tokens_per_batch={sizes[1]}: "
            f"set exactly one of them"
        )
    return BatchingOptions(
        *sizes,
        by_length=spec.sort_by_length,
        mixing=spec.sample_mixing,
        mixing_below=spec.sample_mixing_below,
    )


@dataclass(frozen=True)
class SourceReader:
    """Reader of the sources of a run.

    Attributes:
        spec: options of the run
        type: default dataset type
        util: settings that are passed to every dataset class
    """

    spec: DatasetSpec
    type: str
    util: DatasetUtility

    @property
    def validation_reader(self) -> SourceReader:
        """Reader of validation rows, which can have another length limit than training rows."""
        limit = self.spec.valid_max_seqlen
        if limit is None:
            return self
        return replace(self, spec=replace(self.spec, max_seqlen=limit))

    def describe_limits(self, count: SourceCount) -> str:
        """Format the options that limit the row length of a source, for messages.

        `count` shows whether the source has only validation samples, whose limit can be different.
        """
        spec = self.spec
        name = "max_seqlen"
        limit: int | None = spec.limit
        if spec.valid_max_seqlen is not None and not count.train:
            name = "valid_max_seqlen"
            limit = spec.valid_max_seqlen
        sizes = {
            name: limit,
            "max_prompt_len": spec.max_prompt_len,
            "overlong": self.overlong or "truncate",
        }
        return ", ".join(
            f"dataset.{name}={value}" for name, value in sizes.items() if value is not None
        )

    @property
    def overlong(self) -> str | None:
        """Treatment of rows that are too long, or None to use the default of the dataset type."""
        return "drop" if self.spec.remove_truncated_samples else self.spec.overlong

    def prepare_named(
        self, named: list[tuple[SourceSpec, str]]
    ) -> tuple[list[tuple[SourceSpec, str]], list[str]]:
        """Convert named datasets to files, and return (sources, notes).

        `named` has all sources with their names. A source that is not a named dataset is returned
        unchanged. The notes report rows of named datasets that were left out.
        """
        sources: list[tuple[SourceSpec, str]] = []
        notes: list[str] = []
        for source, name in named:
            if source.named is not None:
                if source.valid_split is None:
                    share = self.spec.valid_split
                else:
                    share = source.valid_split
                if self.spec.valid_path is not None:
                    split = ValidationSplit(0.0, own=False)
                else:
                    split = ValidationSplit(share, own=source.valid_split != 0)
                mode = find_mode(self.type)
                cache = find_cache_root(self.spec.cache_dir)
                prepared = prepare(source, mode, cache, split, self.spec.named_file)
                source = prepared.source
                notes = [*notes, *prepared.notes]
            sources.append((source, name))
        return sources, notes

    def read_source(self, source: SourceSpec, name: str, *, several: bool) -> SourceData:
        """Read one training source and split off its validation samples.

        `several` is True if the run has several sources. Sample ids then begin with the name of
        their source.
        """
        # Determine the share of rows to hold out for validation.
        type, dataset = self._build(source)
        share = source.valid_split
        if share is None:
            if source.valid_path or self.spec.valid_path:
                share = 0.0
            else:
                share = self.spec.valid_split
        if not is_by_index(dataset):
            if share:
                raise ConfigError(
                    f"{name}: an iterable dataset cannot be split; set dataset.valid_path instead "
                    f"of valid_split"
                )
            assert isinstance(dataset, StreamDataset)
            return SourceData(SourceShare(name, 0), dataset, (SourceCount(name, type, 0, 0, 0),))
        # Split the samples, and count them.
        if not len(dataset):
            raise DataError(f"{name}: the dataset is empty")
        train, valid = self._split_samples(source, name, dataset, share)
        train = replace(train, prefix=several)
        epoch_share = SourceShare(name, len(train), source.fraction, source.size, source.weight)
        counts = [
            SourceCount(name, type, len(train), len(valid or ()), len(train), *_find_table(dataset))
        ]
        # Read separate validation rows, and limit their number.
        if source.valid_path is not None:
            valid, count = self.read_validation(
                replace(source, path=source.valid_path, split=None), name
            )
            counts.append(count)
        if valid is not None and source.max_valid is not None and len(valid) > source.max_valid:
            draw = make_generator(self.util.seed, f"max_valid|{name}", 0)
            chosen = np.sort(draw.permutation(len(valid))[: source.max_valid])
            valid = replace(valid, indices=valid.indices[chosen])
            counts[-1] = replace(counts[-1], evaluation=len(valid))
        return SourceData(epoch_share, train, tuple(counts), valid)

    def _split_samples(
        self, source: SourceSpec, name: str, dataset: MapDataset, share: float
    ) -> tuple[SourceSubset, SourceSubset | None]:
        """Divide the samples of a source and return (training samples, held-out samples).

        `share` is the fraction of the samples to hold out for validation. If validation has a
        different length limit, all rows are read a second time with that limit. A row is never used
        for both purposes, even if the two limits drop different rows.
        """
        evaluated: MapDataset | StreamDataset = dataset
        has_own_limit = share > 0 and self.validation_reader.spec.limit != self.spec.limit
        if has_own_limit:
            _, evaluated = self.validation_reader._build(source)
        assert isinstance(evaluated, MapDataset), "built as `dataset` was"
        keys = list(_list_hold_out_keys(dataset))
        if has_own_limit:
            keys += _list_hold_out_keys(evaluated)
        is_held_out = hold_out(keys, share)
        is_evaluated = is_held_out[len(dataset) :] if has_own_limit else is_held_out
        if is_evaluated.any():
            valid = SourceSubset(name, evaluated, np.flatnonzero(is_evaluated))
        else:
            valid = None
        return SourceSubset(name, dataset, np.flatnonzero(~is_held_out[: len(dataset)])), valid

    def read_validation(self, source: SourceSpec, name: str) -> tuple[SourceSubset, SourceCount]:
        """Return all samples of a validation file, and their count.

        The file is `source.path`, and `name` is the name of the source. If `source.args` also
        contains a `path`, it is ignored, because it refers to the training file.
        """
        args = {name: value for name, value in source.args.items() if name != "path"}
        type, dataset = self.validation_reader._build(replace(source, args=args))
        if not is_by_index(dataset):
            raise ConfigError(
                f"dataset.valid_path: type {type!r} is iterable; validation rows are read by index"
            )
        part = SourceSubset(name, dataset, np.arange(len(dataset)))
        return part, SourceCount(name, type, 0, len(part), 0, *_find_table(dataset))

    def _build(self, source: SourceSpec) -> tuple[str, MapDataset | StreamDataset]:
        """Build the dataset of a source and return (dataset type, dataset).

        The user's arguments are passed to the constructor. Options of weft, such as `max_seqlen`,
        are passed too if the constructor has a parameter for them. Raises `ConfigError` if
        arguments or options do not fit the dataset type.
        """
        type = source.type or self.spec.type or detect_type(source, self.type)
        make = datasets.get(type)
        features.check_type_options(self.spec, type)
        check_names(source.columns, type, source.args)
        # Choose the options to pass by the parameters of the constructor.
        spec = self.spec
        offered = {
            "path": source.path or None,
            "split": source.split,
            "max_seqlen": spec.limit,
            "max_prompt_len": spec.max_prompt_len,
            "overlong": self.overlong,
            "truncate_side": spec.truncate_side,
        }
        signature = inspect.signature(make)
        parameters = signature.parameters
        if source.path and "path" not in parameters:
            raise ConfigError(
                f"dataset type {type!r} takes no path, so {source.path} cannot be given to it; "
                f"its constructor is "
                f"{make.__name__}{signature}; use dataset.args"
            )
        open_ended = "path" in parameters and any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
        passed = {}
        for option, value in offered.items():
            if (option in parameters or open_ended) and not (
                value is None and option in OMITTED_IF_UNSET
            ):
                passed[option] = value
        # Check the arguments, build the dataset, and check its interface.
        arguments = {**passed, **source.args}
        try:
            signature.bind(util=self.util, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"dataset.args of type {type!r}: {error}; its constructor is "
                f"{make.__name__}{signature}"
            ) from error
        name = f"{source.named} ({Path(source.path).stem})" if source.named else ""
        dataset = make(util=replace(self.util, columns=source.columns, name=name), **arguments)
        if not (is_by_index(dataset) or isinstance(dataset, StreamDataset)):
            raise ConfigError(
                f"dataset type {type!r}: {make.__name__} has neither __len__ and __getitem__ "
                f"(samples by index) "
                "nor __iter__ (whole batches)"
            )
        if not isinstance(dataset, TokenizedDataset):
            if source.columns:
                raise ConfigError(
                    f"dataset.columns: dataset type {type!r} reads its rows itself; leave columns "
                    f"out"
                )
            features.check_custom_options(spec, type, by_index=is_by_index(dataset))
        return type, dataset


def _find_table(
    dataset: MapDataset,
) -> tuple[TokenizationReport | None, BackgroundTokenTable | None]:
    """Return (tokenization report, background table) of a dataset; at most one of them is not None.

    A dataset whose rows are tokenized during training has a background table but no report yet. For
    a dataset that weft does not tokenize, both are None.
    """
    if not isinstance(dataset, TokenizedDataset):
        return None, None
    table = dataset.table
    if isinstance(table, BackgroundTokenTable):
        return (None, table)
    return (table.report, None)


def detect_type(source: SourceSpec, default_type: str) -> str:
    """Return the dataset type of a source.

    This is `default_type`, or a type for trees if the file contains trees. A file with
    Open-Assistant's message trees needs a type that can read them (see `TREE_TYPES`). Only the
    first row of the file is read.
    """
    if (
        default_type not in TREE_TYPES
        or not source.path
        or not Path(source.path).expanduser().exists()
    ):
        return default_type
    _, row = next(read_rows(find_files(source.path, source.split)[0]))
    if not isinstance(row, UnreadableRow) and is_tree(row):
        return TREE_TYPES[default_type]
    return default_type


def resolve_sources(spec: DatasetSpec) -> list[SourceSpec]:
    """Return the sources of training rows, each with the common arguments and columns.

    Raises `ConfigError` if both a path and a mixture are set.
    """
    path = spec.train_path or spec.path
    listed = list_source_specs(spec)
    if not listed:
        return [SourceSpec(path or "", args=spec.args, columns=spec.columns)]
    if path is not None:
        option = "dataset.named" if spec.sources is None else "dataset.sources"
        raise ConfigError(
            f"{option} and dataset.train_path={path!r} exclude each other; make the path one of "
            f"the sources"
        )
    sources: list[SourceSpec] = []
    for source in listed:
        sources.append(
            replace(
                source,
                args={**spec.args, **source.args},
                columns={} if source.named is not None else {**spec.columns, **source.columns},
            )
        )
    return sources


def assign_unique_names(sources: Sequence[SourceSpec]) -> list[tuple[SourceSpec, str]]:
    """Return each source with a unique name.

    If several files have the same name, the name of the folder is prepended. Repeated named
    datasets are numbered. Raises `ConfigError` if two names are still equal.
    """
    names = [source.name or source.named or _derive_name(source.path) for source in sources]
    for index, source in enumerate(sources):
        if source.named is not None and source.name is None:
            before = sum(
                other.named == source.named and other.name is None for other in sources[:index]
            )
            names[index] = f"{names[index]}-{before + 1}" if before else names[index]
        elif names.count(names[index]) > 1 and source.name is None:
            folder = Path(source.path).expanduser().absolute().parent.name
            names[index] = f"{folder}-{_derive_name(source.path)}"
    for name in names:
        if names.count(name) > 1 or "/" in name:
            raise ConfigError(
                f"dataset.sources: two sources are named {name!r}; set the name of each "
                f"(letters, digits, - . _)"
            )
    return list(zip(sources, names, strict=True))


def _derive_name(path: str) -> str:
    """Derive the name of a source from its path.

    For example, `data/train.jsonl.gz` gives "train", and `owner/name:folder` gives "name".
    """
    if not path:
        return "data"
    last = Path(path.partition(":")[0] if not Path(path).exists() else path).name
    if Path(path).suffix:
        return last.removesuffix(".gz").rsplit(".", 1)[0]
    return last


def _list_hold_out_keys(dataset: MapDataset) -> list[str]:
    """Return one key per sample, which decides whether the sample is held out for validation.

    All samples of a row have the same key, the id of the row's first sample, so that they stay
    together.
    """
    if not isinstance(dataset, TokenizedDataset):
        return [str(index) for index in range(len(dataset))]
    first: dict[int, str] = {}
    for row, id in zip(dataset.table.rows.tolist(), dataset.table.ids, strict=True):
        first.setdefault(row, id)
    return [first[row] for row in dataset.table.rows.tolist()]
