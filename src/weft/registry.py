"""Registries that map names in configurations to Python objects.

The name of a built-in object is the name of its file: `data/datasets/prompt.py` registers the
dataset `prompt`. All names are therefore known without importing anything (`--help` does not import
torch), and adding a file is enough to add a name. The few built-in objects outside of the package
for their kind are listed with the registry. User code registers objects with the `register_*`
functions, as decorators or plain calls. A name can also be an import location: `module:thing` or
`FILE.py:thing`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UserError, build_unknown_name_error

ROOT = Path(__file__).parent
SHARED_MODULES = {
    "base",
    "checks",
    "common",
    "keymap",
    "models",
    "spec",
}  # modules with shared code, which register no name


@dataclass(frozen=True)
class FunctionConversion:
    """Converter of a registered plain function to the object that the registry returns.

    `maker` is the location, as `module:function`, of the function that does the conversion. When
    the registered name is first looked up, the module is imported and its function is called as
    `maker(function, name, **options)`.
    """

    maker: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any], name: str) -> Any:
        module, _, attribute = self.maker.partition(":")
        return getattr(importlib.import_module(module), attribute)(function, name, **self.options)


class Registry:
    """Registry of objects of one kind, such as dataset types or losses, by name.

    `package` is the subpackage of `weft` whose modules register the built-in objects when they are
    imported. `elsewhere` maps the names of further built-in objects to their modules in other
    packages, which `package` must not import.
    """

    def __init__(
        self, kind: str, package: str = "", elsewhere: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self._package = package
        self._elsewhere = elsewhere or {}
        self._objects: dict[str, Any] = {}
        self._conversions: dict[str, FunctionConversion] = {}
        self._converted: dict[str, Any] = {}  # cache of converted functions

    def register(
        self, name: str, thing: Any = None, *, form: FunctionConversion | None = None
    ) -> Any:
        """Register `thing` as `name`, and return it.

        Write `@register("x")` above a definition, or call `register("x", thing)`. With a `form`,
        `thing` is a plain function, and `get` returns the converted object; the function itself is
        not changed. Raises `ConfigError` if the name is taken.
        """
        if thing is None:
            return lambda decorated: self.register(name, decorated, form=form)
        known = self._objects.get(name)
        if known is not None and not _have_same_definition(known, thing):
            raise ConfigError(
                f"the {self.kind} {name!r} is registered twice; give the second one another name"
            )
        if form is not None and not inspect.isfunction(thing):
            raise ConfigError(
                f"the {self.kind} {name!r}: {', '.join(form.options)} is for functions; leave it "
                f"out"
            )
        if form is not None:
            self._conversions[name] = form
        self._objects[name] = thing
        self._converted.pop(name, None)
        return thing

    def list_shipped(self) -> list[str]:
        """Return the names of the built-in modules, without importing them.

        Modules with shared code, and those whose name begins with an underscore, are left out.
        """
        if not self._package:
            return []
        folder = ROOT.joinpath(*self._package.split("."))
        module_names = (module.name for module in pkgutil.iter_modules([str(folder)]))
        names = {
            name for name in module_names if not name.startswith("_") and name not in SHARED_MODULES
        }
        return sorted(names | set(self._elsewhere))

    def list_names(self) -> list[str]:
        """Return the sorted names of all built-in modules and registered objects.

        Nothing is imported, so further names that a built-in module registers may be missing.
        """
        return sorted({*self.list_shipped(), *self._objects})

    def get(self, name: str) -> Any:
        """Return the object registered as `name`, importing its module if needed.

        A function that was registered with a `FunctionConversion` is converted. Raises
        `ConfigError` for an unknown name; the message suggests similar names.
        """
        if name not in self._objects and name in self.list_shipped():
            self._import_shipped(name)
        if name not in self._objects and ":" in name:
            return self._load_from_path(name)
        if name not in self._objects:
            self.load_all()
        if name not in self._objects:
            raise build_unknown_name_error(self.kind, name, self._objects)
        return self._convert(name)

    def _import_shipped(self, name: str) -> None:
        importlib.import_module(self._elsewhere.get(name, f"weft.{self._package}.{name}"))

    def _convert(self, name: str) -> Any:
        if name not in self._conversions:
            return self._objects[name]
        if name not in self._converted:
            self._converted[name] = self._conversions[name](self._objects[name], name)
        return self._converted[name]

    def _load_from_path(self, place: str) -> Any:
        """Return the object at the location `place`, either `module:thing` or `FILE.py:thing`.

        If the object is not registered yet, it is registered with the location as its name. A
        function that was registered with a `FunctionConversion` is converted.
        """
        home, _, attribute = place.rpartition(":")
        import_user_code([home])
        module = sys.modules[Path(home).stem if home.endswith(".py") else home]
        if attribute not in vars(module):
            raise build_unknown_name_error(
                f"{self.kind} in {home}",
                attribute,
                (n for n in vars(module) if not n.startswith("_")),
            )
        thing = vars(module)[attribute]
        known = next((name for name, each in self._objects.items() if each is thing), None)
        if known is None:
            known = place
            self.register(place, thing)
        return self._convert(known)

    def load_all(self) -> list[str]:
        """Import all built-in modules and return all registered names, sorted.

        A module can register several names. Objects that were looked up by their location, such as
        `FILE.py:thing`, are left out.
        """
        for module in self.list_shipped():
            self._import_shipped(module)
        return sorted(name for name in self._objects if ":" not in name)

    def __contains__(self, name: object) -> bool:
        if name in self._objects or name in self.list_shipped():
            return True
        return isinstance(name, str) and ":" in name and self._load_from_path(name) is not None


def _have_same_definition(one: Any, other: Any) -> bool:
    """Return whether two objects come from the same definition in the source code.

    A module that is imported both as a file and by name defines its objects twice.
    """
    if isinstance(one, partial) and isinstance(other, partial):
        same_arguments = (one.args, one.keywords) == (other.args, other.keywords)
        return same_arguments and _have_same_definition(one.func, other.func)
    try:
        return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
    except AttributeError:
        return one is other


Register = Callable[..., Any]

datasets = Registry("dataset type", "data.datasets")
interfaces = Registry("interface", "interfaces")
functions = Registry("host function", "host")
verifiers = Registry("verifier", "host.verifiers")
backends = Registry("backend", "engine.backends", {"service": "weft.serve.client"})
families = Registry("model family", "models.families")
losses = Registry("loss", "algorithms")
experiments = Registry("experiment")
readers = Registry("reader of named datasets", "data.named.readers")
named_datasets = Registry("named dataset")
quickstarts = Registry("quickstart", "experiments")

register_interface: Register = interfaces.register
register_function: Register = functions.register
register_verifier: Register = verifiers.register
register_backend: Register = backends.register
register_experiment: Register = experiments.register
register_quickstart: Register = quickstarts.register
register_reader: Register = readers.register


def register_dataset(name: str, thing: Any = None, *, rows: str | None = None) -> Any:
    """Register a dataset class or, if `rows` is given, a function that converts each row.

    Such a function is called as `thing(row, option=...)`. It returns the row in the form that a
    built-in dataset reads; `rows` is the name of this dataset. See
    `weft.data.datasets._row_function`.
    """
    if rows is None:
        form = None
    else:
        form = FunctionConversion(
            "weft.data.datasets._row_function:make_dataset_class", {"rows": rows}
        )
    return datasets.register(name, thing, form=form)


def register_named_dataset(name: str, **entry: Any) -> Any:
    """Register the description of a public dataset under a short name.

    Example: `register_named_dataset("mine", reader="pairs", modes=["rm"], repo="OWNER/NAME", ...)`.
    The keyword arguments are the keys of a dataset's entry in a YAML file of named datasets (see
    the option `dataset.named_file` and docs/named-datasets.md).
    """
    return named_datasets.register(name, entry)


def register_loss(
    name: str, thing: Any = None, *, per: str | None = None, by_row: bool = False
) -> Any:
    """Register a loss class (or factory function) or, if `per` is given, a plain loss function.

    A class or factory builds the loss from its options. With `per` set to "token" or "completion",
    `thing` is a function that is called as `thing(logprobs, ..., option=...)`, and returns the loss
    of each token or completion. See `weft.algorithms.base`.
    """
    if per is None:
        form = None
    else:
        form = FunctionConversion(
            "weft.algorithms.base:make_loss_constructor", {"per": per, "by_row": by_row}
        )
    return losses.register(name, thing, form=form)


def register_advantage(name: str, function: Any = None, *, per: str = "completion") -> Any:
    """Register a host function that computes `advantages`.

    `function(rewards, group, ..., option=...)` returns one number per completion, or per token with
    `per="token"`. See `weft.host._functions`.
    """
    return functions.register(
        name,
        function,
        form=FunctionConversion("weft.host._functions:build_advantage_function", {"per": per}),
    )


def register_filter(name: str, function: Any = None) -> Any:
    """Register a host function that decides which prompts to keep.

    `function(rewards, ..., option=...)` is called once per prompt, and returns whether to keep the
    prompt. Each parameter without a default is named after a batch key or data column, and receives
    the values of this prompt. See `weft.host._functions`.
    """
    return functions.register(
        name, function, form=FunctionConversion("weft.host._functions:build_filter_function")
    )


def register_hf_family(family: Any) -> Any:
    """Register a model family (`weft.models.families.base.Family`) under its attribute `name`."""
    return families.register(family.name, family)


USER_FOLDER = "experiments"  # in the working directory


def import_user_code(names: Iterable[str]) -> None:
    """Import modules (`package.module`) and files (`path/to/file.py`) that register objects.

    The working directory and the folder of each file are added to `sys.path`. Raises `ConfigError`
    if a module or file is missing or its import fails; the message contains the name.
    """
    _make_importable(Path.cwd())
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser())
            else:
                importlib.import_module(name)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"import of {name!r} failed: {type(error).__name__}: {error}"
            ) from error


def import_user_folder() -> None:
    """Import the files that mention weft from the folder `experiments/` in the working directory.

    The files are imported as modules of the package `experiments`.
    """
    folder = Path.cwd() / USER_FOLDER
    if not folder.is_dir() or folder.samefile(ROOT / USER_FOLDER):
        return
    files = sorted(f for f in folder.glob("*.py") if "weft" in f.read_text(errors="replace"))
    import_user_code(
        f"{USER_FOLDER}.{f.stem}" if f.stem != "__init__" else USER_FOLDER for f in files
    )


def _import_file(file: Path) -> None:
    """Import a Python file as a top-level module, unless it has already been imported.

    The module has the file's name without the suffix. Raises `ConfigError` if the file is missing
    or another module has the same name.
    """
    if not file.is_file():
        raise ConfigError(f"import of {str(file)!r}: there is no such file")
    _make_importable(file.resolve().parent)
    known = sys.modules.get(file.stem)
    if (
        known is not None
        and known.__spec__ is not None
        and known.__spec__.origin == str(file.resolve())
    ):
        return
    if known is not None or file.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"import of {str(file)!r}: another module is called {file.stem!r}; rename the file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file.stem]
        raise


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
